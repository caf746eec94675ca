"""Memory that travels."""

from __future__ import annotations

import array
import gc
import weakref

import pytest
import torch

from tensorplay.distributed.rpc import buffers
from tensorplay.distributed.rpc.buffers import ALIGNMENT, SMALL_BYTES

SIZES = [1, 100, SMALL_BYTES, SMALL_BYTES + 1, 1_000_003]


@pytest.mark.parametrize("nbytes", [0, *SIZES])
def test_allocated_memory_is_writable_and_aligned(nbytes: int) -> None:
    memory = buffers.allocate(nbytes)
    assert (memory.nbytes, memory.format, memory.readonly) == (nbytes, "B", False)
    if nbytes:
        memory[-1] = 7
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        assert tensor[-1] == 7
        assert tensor.data_ptr() % ALIGNMENT == 0


def test_a_view_keeps_the_memory_of_its_tensor() -> None:
    tensor = torch.full((100_000,), 3, dtype=torch.uint8)
    gone = weakref.ref(tensor.untyped_storage())
    memory = buffers.of_tensor(tensor)
    del tensor
    gc.collect()
    assert bytes(memory[-2:]) == b"\3\3"
    del memory
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_snapshot_does_not_change(nbytes: int) -> None:
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    memory = buffers.snapshot(tensor.data_ptr(), nbytes)
    tensor.zero_()
    assert bytes(memory) == b"\1" * nbytes


@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
def test_a_copy_of_any_buffer(count: int) -> None:
    source = array.array("d", range(count))
    copy = buffers.copied(source)
    for index in range(count):
        source[index] = -1
    assert bytes(copy) == array.array("d", range(count)).tobytes()


def test_writable_buffers_are_not_copied() -> None:
    memory = memoryview(bytearray(b"abc"))
    assert buffers.writable(memory) is memory
    for frame in (b"abc", memoryview(b"abc")):
        copy = buffers.writable(frame)
        assert bytes(copy) == b"abc"
        assert not memoryview(copy).readonly


@pytest.mark.parametrize("shift", range(ALIGNMENT))
def test_memory_becomes_an_aligned_tensor(shift: int) -> None:
    frame = memoryview(bytearray(shift) + bytearray(b"0123456789"))[shift:]
    tensor = buffers.as_tensor(frame)
    assert bytes(tensor.tolist()) == b"0123456789"
    assert tensor.data_ptr() % ALIGNMENT == 0
