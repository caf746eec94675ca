"""Tensors between devices and the host: the one place where calls copy them.

A ``Stager`` copies; ``use`` puts another in its place, such as a fake in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Stager(Protocol):
    """Copies tensors to the host and to devices."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in host memory with the values that the tensor has now."""

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of a host tensor on a device."""


class DeviceStager:
    """Copies on a stream of its own for each device, through pinned memory where it can."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in host memory with the values that the tensor has now."""
        if tensor.device.type != "cuda" or tensor.layout is not torch.strided:
            return tensor.cpu()
        stream = self._stream(tensor.device)
        # What the current stream has queued writes the values that are to be copied.
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=True
            )
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        stream.synchronize()
        return host

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of a host tensor on a device."""
        if device.type != "cuda" or tensor.layout is not torch.strided:
            return tensor.to(device)
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            copy = tensor.to(device, non_blocking=True)
        # The values must be there for whatever is queued next, and the host memory in use
        # until they are.
        torch.cuda.current_stream(device).wait_stream(stream)
        copy.record_stream(torch.cuda.current_stream(device))
        stream.synchronize()
        return copy

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        return stream


_stager: Stager = DeviceStager()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory with the values that the tensor has now."""
    return _stager.to_host(tensor)


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a copy of a host tensor on a device of this process.

    Raises:
        RuntimeError: If there is no such device; the text says which there are.
    """
    target = torch.device(device)
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"a tensor was sent to {device}, but this process has "
            f"{torch.cuda.device_count()} CUDA devices; mend the sender's device map"
        )
    return _stager.to_device(tensor, target)


@contextmanager
def use(stager: Stager) -> Iterator[None]:
    """Has another stager copy within it."""
    global _stager
    before, _stager = _stager, stager
    try:
        yield
    finally:
        _stager = before
