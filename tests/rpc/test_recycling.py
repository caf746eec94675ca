"""Memory of buffers that are gone."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from tensorplay.distributed.rpc import buffers, memory, recycling
from tensorplay.distributed.rpc.recycling import IDLE_SECONDS, Recycler

MIB = 1 << 20


@pytest.fixture
def recycler() -> Recycler:
    return Recycler(limit=8 * MIB)


def test_memory_is_used_again(recycler: Recycler) -> None:
    first = recycler.allocate(MIB)
    where = memory.address(first)
    second = recycler.allocate(MIB)
    assert memory.address(second) != where
    assert recycler.kept == 0
    del first
    assert recycler.kept == MIB
    third = recycler.allocate(MIB - 1)
    assert (memory.address(third), len(third)) == (where, MIB - 1)
    assert recycler.kept == 0


def test_not_while_anything_refers_to_it(recycler: Recycler) -> None:
    buffer = recycler.allocate(MIB)
    tensor = torch.frombuffer(buffer, dtype=torch.float32)
    view = tensor[5:8]
    del buffer, tensor
    gc.collect()
    assert recycler.kept == 0
    view.fill_(3)
    other = recycler.allocate(MIB)
    other[:] = bytes(MIB)
    assert view.tolist() == [3, 3, 3]
    del view
    assert recycler.kept == MIB


def test_the_limit_holds(recycler: Recycler) -> None:
    many = [recycler.allocate(MIB) for _ in range(12)]
    large = recycler.allocate(9 * MIB)
    del many, large
    assert recycler.kept == 8 * MIB
    assert len(recycler.allocate(9 * MIB)) == 9 * MIB


def test_what_lies_idle_is_given_back(recycler: Recycler) -> None:
    del (many := [recycler.allocate(MIB) for _ in range(3)])[:]
    now = time.monotonic()
    recycler.trim(now + IDLE_SECONDS / 2)
    assert recycler.kept == 3 * MIB
    recycler.trim(now + IDLE_SECONDS + 1)
    assert recycler.kept == 0
    assert many == []


def test_threads(recycler: Recycler) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            buffer = recycler.allocate(600_000)
            buffer[0] = buffer[-1] = number
            if bytes(buffer[:1]) != bytes([number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert recycler.kept <= 8 * MIB


def test_large_buffers_are_recycled_and_small_ones_are_not() -> None:
    size = recycling.SMALLEST_BYTES + 12345
    where = memory.address(buffers.allocate(size))
    assert memory.address(buffers.allocate(size)) == where
    before = recycling._shared.kept
    buffers.allocate(recycling.SMALLEST_BYTES - 1)
    assert recycling._shared.kept == before
