"""Memory that travels: snapshots of tensors at the sender, tensors' memory at the receiver."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

#: Buffers up to this size are Python bytes; larger ones come from ``allocate``.
SMALL_BYTES = 64 << 10
#: Alignment, in bytes, of memory that any dtype can be read from.
ALIGNMENT = 16

Buffer = bytes | memoryview


def allocate(nbytes: int) -> memoryview:
    """Returns a writable buffer of so many bytes, aligned for every dtype, not cleared."""
    if nbytes == 0:
        return memoryview(bytearray())
    return of_tensor(torch.empty(nbytes, dtype=torch.uint8))


def of_tensor(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous host tensor that has elements, and keeps it alive."""
    array = _array(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
    array._owner = tensor  # the view keeps the array, the array the tensor
    return memoryview(array).cast("B")


def snapshot(address: int, nbytes: int) -> Buffer:
    """Returns a copy of memory of this process."""
    if nbytes <= SMALL_BYTES:
        return ctypes.string_at(address, nbytes)
    source = torch.frombuffer(_array(address, nbytes), dtype=torch.uint8)
    copy = torch.empty(nbytes, dtype=torch.uint8)
    copy.copy_(source)  # uses several threads
    return of_tensor(copy)


def copied(buffer: Any) -> Buffer:
    """Returns a copy of anything with contiguous memory, such as a NumPy array's buffer."""
    view = memoryview(buffer).cast("B")
    if view.nbytes <= SMALL_BYTES:
        return bytes(view)
    copy = allocate(view.nbytes)
    copy[:] = view
    return copy


def writable(buffer: Buffer) -> Buffer | bytearray:
    """Returns a buffer that can be written to: itself, or a copy if it is read-only."""
    return buffer if isinstance(buffer, memoryview) and not buffer.readonly else bytearray(buffer)


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """Returns a tensor of bytes that lies in a buffer that is not empty.

    A read-only or badly aligned buffer is copied.
    """
    tensor = torch.frombuffer(writable(buffer), dtype=torch.uint8)
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _array(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)
