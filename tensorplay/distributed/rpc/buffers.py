"""Memory that travels: snapshots of tensors at the sender, tensors' memory at the receiver."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tensorplay.distributed.rpc import memory, recycling
from tensorplay.distributed.rpc.shm import Leases

#: Buffers up to this size are Python bytes; larger ones come from ``allocate``.
SMALL_BYTES = 64 << 10
#: Alignment, in bytes, of memory that any dtype can be read from.
ALIGNMENT = 16

Buffer = bytes | memoryview


def allocate(nbytes: int) -> memoryview:
    """Returns a writable buffer of so many bytes, aligned for every dtype, not cleared."""
    if nbytes == 0:
        return memoryview(bytearray())
    if nbytes >= recycling.SMALLEST_BYTES:
        return recycling.allocate(nbytes)
    return of_tensor(torch.empty(nbytes, dtype=torch.uint8))


def of_tensor(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous host tensor that has elements, and keeps it alive."""
    array = memory.array(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
    array._owner = tensor  # the view keeps the array, the array the tensor
    return memoryview(array).cast("B")


def snapshot(address: int, nbytes: int, leases: Leases | None = None) -> Buffer:
    """Returns a copy of memory of this process.

    Args:
        address: Where it begins.
        nbytes: Bytes of it.
        leases: Gives memory that the receiver shares.
    """
    if leases is not None and (block := leases.take(nbytes)) is not None:
        block.fill(address)
        return block.memory
    if nbytes <= SMALL_BYTES:
        return ctypes.string_at(address, nbytes)
    copy = allocate(nbytes)
    memory.copy(memory.address(copy), address, nbytes)
    return copy


def copied(buffer: Any, leases: Leases | None = None) -> Buffer:
    """Returns a copy of anything with contiguous memory, such as a NumPy array's buffer.

    Args:
        buffer: What has it.
        leases: Gives memory that the receiver shares.
    """
    view = memoryview(buffer).cast("B")
    if leases is not None and (block := leases.take(view.nbytes)) is not None:
        block.memory[:] = view
        return block.memory
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
