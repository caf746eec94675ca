"""Copies through two buffers, with a device that copies as late as it may."""

from __future__ import annotations

import pytest
import torch

from tensorplay.distributed.rpc import pipelined
from tensorplay.distributed.rpc.pipelined import Wait

CHUNK = 1000
COUNTS = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 3]


class Device:
    """Copies in order, and only when somebody waits, as a stream may."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.most = 0
        self.done = 0
        self.begun = 0

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        assert target.shape == source.shape
        self.queue.append((target, source))
        self.begun += 1
        number = self.begun
        self.most = max(self.most, len(self.queue))

        def wait() -> None:
            while self.done < number:
                target, source = self.queue.pop(0)
                target.copy_(source)
                self.done += 1

        return wait


def pinned() -> torch.Tensor:
    return torch.full((2, CHUNK), 99, dtype=torch.uint8)


@pytest.mark.parametrize("count", COUNTS)
def test_to_host(count: int) -> None:
    device = Device()
    source = torch.randint(0, 256, (count,), dtype=torch.uint8)
    target = torch.zeros(count, dtype=torch.uint8)
    pipelined.to_host(target, source, pinned(), device.start)
    assert torch.equal(target, source)
    assert not device.queue
    assert device.most == min(2, device.begun)


@pytest.mark.parametrize("count", COUNTS)
def test_to_a_device(count: int) -> None:
    device = Device()
    source = torch.randint(0, 256, (count,), dtype=torch.uint8)
    target = torch.zeros(count, dtype=torch.uint8)
    pipelined.to_device(target, source, pinned(), device.start)
    assert torch.equal(target, source)
    assert not device.queue
    assert device.most == min(2, device.begun)
