"""Copies within memory, and the sizes that it is kept in."""

from __future__ import annotations

import pytest
import torch

from tensorplay.distributed.rpc import memory

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [1, 1000, MIB + 3, memory.THREADED_BYTES + 5])
def test_copies(nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = bytearray(nbytes + 1)
    memory.copy(memory.address(memoryview(target)), source.data_ptr(), nbytes)
    assert torch.frombuffer(target, dtype=torch.uint8)[:nbytes].equal(source)
    assert target[nbytes] == 0


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_000, MIB, MIB + 1, 10**9])
def test_a_block_is_hardly_larger_than_what_it_is_for(nbytes: int) -> None:
    size = memory.block_bytes(nbytes)
    assert nbytes <= size <= max(nbytes * 1.125, nbytes + 4095)
    assert size % 4096 == 0
    assert memory.block_bytes(size) == size
