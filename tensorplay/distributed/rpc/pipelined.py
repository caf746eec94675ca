"""Copies between a device and host memory that is not pinned: through two pinned buffers.

A device copies from and to pinned memory alone without help, and then at full speed. So while the
device copies one chunk, the processor copies the other between its buffer and the host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tensorplay.distributed.rpc import memory

#: Bytes of a chunk: large beside what starting a copy costs, small beside the caches.
CHUNK_BYTES = 4 << 20

#: Waits until a copy is done.
Wait = Callable[[], None]
#: Begins to copy the second tensor of bytes into the first.
Start = Callable[[torch.Tensor, torch.Tensor], Wait]


def to_host(target: torch.Tensor, source: torch.Tensor, pinned: torch.Tensor, start: Start) -> None:
    """Copies memory of a device into host memory.

    Args:
        target: Host memory, of shape (n,) and dtype uint8.
        source: Memory of a device, likewise.
        pinned: Host memory of shape (2, m), where m is the size of a chunk.
        start: Begins to copy a chunk from the device.
    """
    before: Wait | None = None
    place = target.data_ptr()
    for number, chunk in enumerate(_chunks(source, pinned.size(1))):
        buffer = pinned[number % 2, : chunk.numel()]
        wait = start(buffer, chunk)
        if before is not None:
            place = _drain(place, pinned[(number - 1) % 2], pinned.size(1), before)
        before = wait
        last = buffer
    if before is not None:
        _drain(place, last, last.numel(), before)


def to_device(
    target: torch.Tensor, source: torch.Tensor, pinned: torch.Tensor, start: Start
) -> None:
    """Copies host memory into memory of a device.

    Args:
        target: Memory of a device, of shape (n,) and dtype uint8.
        source: Host memory, likewise.
        pinned: Host memory of shape (2, m), where m is the size of a chunk.
        start: Begins to copy a chunk to the device.
    """
    waits: list[Wait | None] = [None, None]
    place = source.data_ptr()
    for number, chunk in enumerate(_chunks(target, pinned.size(1))):
        used = waits[number % 2]
        if used is not None:
            used()
        buffer = pinned[number % 2, : chunk.numel()]
        memory.copy(buffer.data_ptr(), place, chunk.numel())
        place += chunk.numel()
        waits[number % 2] = start(chunk, buffer)
    for wait in waits:
        if wait is not None:
            wait()


def _chunks(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    for first in range(0, tensor.numel(), nbytes):
        yield tensor[first : first + nbytes]


def _drain(place: int, buffer: torch.Tensor, nbytes: int, wait: Wait) -> int:
    """Copies a chunk that has come to its place, and returns that of the next."""
    wait()
    memory.copy(place, buffer.data_ptr(), nbytes)
    return place + nbytes
