"""The sender's pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
import torch

from tensorplay.distributed.rpc import memory
from tensorplay.distributed.rpc.shm import files, slabs
from tensorplay.distributed.rpc.shm.slabs import SLAB_BYTES, Lease, SlabPool

from .helpers import ME, slab_descriptors

MIB = 1 << 20


@pytest.fixture
def pool() -> SlabPool:
    return SlabPool(ME, 64 * MIB)


@pytest.fixture(autouse=True)
def _closed(pool: SlabPool) -> Iterator[None]:
    yield
    pool.close()
    assert slab_descriptors() == []


def taken(pool: SlabPool, peer: int, nbytes: int) -> Lease:
    lease = pool.allocate(peer, nbytes)
    assert lease is not None
    return lease


def test_a_lease_is_filled() -> None:
    for nbytes in (1, 70_000, memory.THREADED_BYTES + 3):
        pool = SlabPool(ME, 64 * MIB)
        source = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)
        lease = taken(pool, 1, nbytes)
        lease.fill(source.data_ptr())
        assert torch.frombuffer(lease.memory, dtype=torch.uint8).equal(source)
        pool.close()


def test_no_two_leases_overlap(pool: SlabPool) -> None:
    leases = [taken(pool, 1, 100_000) for _ in range(100)]
    for number, lease in enumerate(leases):
        lease.memory[:] = bytes([number]) * 100_000
    assert all(
        bytes(lease.memory) == bytes([number]) * 100_000 for number, lease in enumerate(leases)
    )
    blocks = [lease.block(2) for lease in leases]
    assert len({(block.slab, block.lease) for block in blocks}) == 100
    assert all(block.frame == 2 and block.offset % 4096 == 0 for block in blocks)
    assert pool.stats()["slab_leases"] == 100


def test_a_returned_block_is_the_next_to_be_used(pool: SlabPool) -> None:
    first, second = taken(pool, 1, MIB), taken(pool, 1, MIB)
    before = pool.stats()
    where = first.block(0).offset
    first.undo()
    again = taken(pool, 1, MIB)
    assert again.block(0).offset == where
    assert pool.stats() == before
    assert second.block(0).offset != where


def test_each_peer_has_slabs_of_its_own(pool: SlabPool) -> None:
    taken(pool, 1, 100_000).undo()
    assert taken(pool, 2, 100_000).block(0).slab != taken(pool, 1, 100_000).block(0).slab


def test_a_lost_peers_slabs_are_never_used_again(pool: SlabPool) -> None:
    lost = taken(pool, 1, MIB)
    taken(pool, 2, MIB)
    memory, number = lost._slab.memory, lost.block(0).slab
    pool.drop(1)
    assert memory[files.RETIRED] == 1
    assert pool.stats()["slabs"] == 1
    assert pool.peers() == [2]
    assert taken(pool, 1, MIB).block(0).slab != number
    pool.drop(77)


def test_the_limit_holds(pool: SlabPool) -> None:
    leases = []
    while (lease := pool.allocate(1, 3 * MIB)) is not None:
        leases.append(lease)
    assert 16 <= len(leases) <= 21
    assert pool.stats()["slab_bytes"] <= pool.limit
    assert pool.allocate(1, pool.limit) is None
    assert pool.allocate(2, 65 * MIB) is None
    leases[5].undo()
    assert taken(pool, 1, 3 * MIB).block(0).slab == leases[5].block(0).slab


def test_idle_slabs_give_way_to_others(pool: SlabPool) -> None:
    leases = [taken(pool, 1, 20 * MIB) for _ in range(3)]
    assert pool.allocate(2, 20 * MIB) is None
    leases[1].undo()
    memory = leases[1]._slab.memory
    taken(pool, 2, 19 * MIB)
    assert memory[files.RETIRED] == 1
    assert [lease._slab.memory[files.RETIRED] for lease in leases] == [0, 1, 0]


def test_what_is_held_for_long_is_left_to_its_receiver(
    pool: SlabPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = [taken(pool, 1, 20 * MIB) for _ in range(3)]
    monkeypatch.setattr(slabs, "HELD_SECONDS", -1.0)
    assert pool.allocate(1, 20 * MIB) is None  # nobody has mapped them yet
    leases[0]._slab.memory[files.MAPPED] = 1
    taken(pool, 1, 20 * MIB)
    assert [lease._slab.memory[files.RETIRED] for lease in leases] == [1, 0, 0]
    assert pool.stats()["slab_bytes"] <= pool.limit


def test_what_lies_idle_is_given_up(pool: SlabPool) -> None:
    idle, busy = taken(pool, 1, MIB), taken(pool, 1, 5 * MIB)
    idle.undo()
    now = time.monotonic()
    pool.trim(now + slabs.IDLE_SECONDS / 2)
    assert pool.stats()["slabs"] == 2
    pool.trim(now + slabs.IDLE_SECONDS + 1)
    assert pool.stats()["slabs"] == 1
    assert busy._slab.memory[files.RETIRED] == 0


def test_the_number_of_slabs_is_bounded(pool: SlabPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "MOST_SLABS", 3)
    for _ in range(3):
        taken(pool, 1, SLAB_BYTES)
    assert pool.allocate(1, SLAB_BYTES) is None


def test_short_of_memory_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SlabPool(ME, 64 * MIB, available=lambda: MIB)
    with caplog.at_level(logging.WARNING):
        assert pool.allocate(1, MIB) is None
        assert pool.allocate(1, 2 * MIB) is None
    assert len(caplog.records) == 1
    assert "go through the broker" in caplog.text
    assert pool.stats() == {"slabs": 0, "slab_bytes": 0, "slab_leases": 0}


def test_what_the_system_refuses_travels_as_frames(
    pool: SlabPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(owner: int, number: int, size: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(files, "create", refuse)
    assert pool.allocate(1, MIB) is None
    assert pool.stats()["slab_bytes"] == 0
