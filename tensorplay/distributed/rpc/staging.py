"""Memory between devices and the host: the one place where calls copy it.

A ``Stager`` copies; ``use`` puts another in its place, such as a fake in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from tensorplay.distributed.rpc import pipelined
from tensorplay.errors import ConfigError


class Stager(Protocol):
    """Copies memory, as one-dimensional tensors of bytes, to the host and to devices."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Returns whether the elements of a tensor lie in host memory."""

    def to_host(self, memory: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a copy in host memory, ``target`` if given, with the values of now."""

    def to_device(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of host memory on a device."""

    def devices(self) -> Sequence[str]:
        """Returns the devices that there are beside the host, such as ``"cuda:0"``."""


class DeviceStager:
    """Copies on a stream of its own for each CUDA device, through pinned memory where it can.

    Pinned memory comes from torch's own allocator, which keeps it for further use.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Returns whether the elements of a tensor lie in host memory."""
        return tensor.is_cpu

    def to_host(self, memory: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a copy in host memory, ``target`` if given, with the values of now."""
        if memory.device.type != "cuda":
            return memory.cpu() if target is None else target.copy_(memory)
        start = self._starter(memory.device)
        if target is None:
            target = _pinned(memory.numel())
            start(target, memory)()
        else:
            pipelined.to_host(target, memory, _pinned(2, _chunk(memory)), start)
        return target

    def to_device(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of host memory on a device."""
        if device.type != "cuda":
            return memory.to(device)
        copy = torch.empty(memory.numel(), dtype=torch.uint8, device=device)
        start = self._starter(copy.device)
        if memory.is_pinned():
            start(copy, memory)()
        else:
            pipelined.to_device(copy, memory, _pinned(2, _chunk(memory)), start)
        return copy

    def devices(self) -> Sequence[str]:
        """Returns the devices that there are beside the host, such as ``"cuda:0"``."""
        if not torch.accelerator.is_available():
            return []
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]

    def _starter(self, device: torch.device) -> pipelined.Start:
        """Returns what begins a copy on the device's stream and returns what waits for it.

        It waits for this copy alone: not for what else the device has to do.
        """
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        # What the current stream has queued writes the source, or still reads what was in the
        # target's memory before.
        stream.wait_stream(torch.cuda.current_stream(device))

        def start(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            event = stream.record_event()
            return lambda: event.synchronize()

        return start


def is_host(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor lie in host memory."""
    return _stager.is_host(tensor)


def to_host(memory: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a copy in host memory with the values that ``memory`` has now.

    Args:
        memory: Of shape (n,) and dtype uint8, on a device.
        target: Where to copy it, of the same shape and dtype; None for new memory.
    """
    return _stager.to_host(memory, target)


def to_device(memory: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a copy of host memory on a device of this process.

    Args:
        memory: Of shape (n,) and dtype uint8.
        device: Such as ``"cuda:1"``.

    Raises:
        ConfigError: If there is no such device; the text says which there are.
        RuntimeError: If ``device`` is no name of a device.
    """
    target = torch.device(device)
    available = _stager.devices()
    if f"{target.type}:{target.index or 0}" not in available:
        raise ConfigError(
            f"a tensor was sent to the device {device!r}, which this process lacks: it has "
            f"{', '.join(['cpu', *available])}; mend the device map of the sender"
        )
    return _stager.to_device(memory, target)


@contextmanager
def use(stager: Stager) -> Iterator[None]:
    """Has another stager copy within it."""
    global _stager
    before, _stager = _stager, stager
    try:
        yield
    finally:
        _stager = before


def _pinned(*shape: int) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # as much is pinned as the system allows
        return torch.empty(shape, dtype=torch.uint8)


def _chunk(memory: torch.Tensor) -> int:
    return max(1, min(memory.numel(), pipelined.CHUNK_BYTES))


_stager: Stager = DeviceStager()
