"""The receiver's side: blocks to tensors, and back to the sender."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tensorplay.distributed.rpc import buffers
from tensorplay.distributed.rpc.shm.forks import forks
from tensorplay.distributed.rpc.shm.mapping import Mappings
from tensorplay.distributed.rpc.shm.slabs import Lease, SlabPool
from tensorplay.errors import ProtocolError, WorkerLostError

from .helpers import ME, mapped_slabs, this_process

COUNT = 100_000


@pytest.fixture
def pool() -> Iterator[SlabPool]:
    pool = SlabPool(ME, 64 << 20)
    yield pool
    pool.close()


@pytest.fixture
def mappings() -> Mappings:
    return Mappings()


def leased(pool: SlabPool, value: int = 1) -> Lease:
    lease = pool.allocate(1, COUNT)
    assert lease is not None
    lease.memory[:] = bytes([value]) * COUNT
    return lease


def received(mappings: Mappings, lease: Lease) -> torch.Tensor:
    (frame,) = mappings.attach(this_process(), [lease.block(0)], [])
    return buffers.as_tensor(frame)


def test_nothing_is_copied(pool: SlabPool, mappings: Mappings) -> None:
    lease = leased(pool, 5)
    tensor = received(mappings, lease)
    assert tensor.tolist() == [5] * COUNT
    tensor[0] = 9
    assert lease.memory[0] == 9
    assert lease._slab.mapped


def test_a_block_returns_when_the_last_view_is_gone(pool: SlabPool, mappings: Mappings) -> None:
    tensor = received(mappings, leased(pool))
    view = tensor[10:20].view(2, 5).t()
    storage = tensor.untyped_storage()
    for held in ("tensor", "view", "storage"):
        assert pool.stats()["slab_leases"] == 1, held
        if held == "tensor":
            del tensor
        elif held == "view":
            del view
        else:
            del storage
        gc.collect()
    assert pool.stats()["slab_leases"] == 0


def test_a_slab_is_mapped_once(pool: SlabPool, mappings: Mappings) -> None:
    tensors = [received(mappings, leased(pool, value)) for value in range(5)]
    assert [int(tensor[-1]) for tensor in tensors] == list(range(5))
    assert len(mappings) == 1


def test_frames_in_memory_and_others_come_in_order(pool: SlabPool, mappings: Mappings) -> None:
    blocks = [leased(pool, 1).block(1), leased(pool, 2).block(3), leased(pool, 3).block(4)]
    whole = mappings.attach(this_process(), blocks, [b"a", b"b"])
    assert [bytes(frame[:1]) for frame in whole] == [b"a", b"\1", b"b", b"\2", b"\3"]


def test_what_a_sender_gave_up_is_forgotten_when_nothing_of_it_is_held(
    pool: SlabPool, mappings: Mappings
) -> None:
    lease = leased(pool, 6)
    tensor = received(mappings, lease)
    name = f"tensorplay-{ME:x}-{lease.block(0).slab}"
    del lease
    pool.drop(1)
    mappings.trim()
    assert len(mappings) == 1  # another message that names it might be under way
    del tensor
    mappings.trim()
    gc.collect()
    assert len(mappings) == 0
    assert not any(name in mapped for mapped in mapped_slabs())


def test_tensors_outlive_the_sender(pool: SlabPool, mappings: Mappings) -> None:
    tensor = received(mappings, leased(pool, 4))
    pool.close()
    mappings.drop(ME)
    gc.collect()
    assert len(mappings) == 0
    assert tensor.sum() == 4 * COUNT
    tensor.fill_(2)
    assert tensor.sum() == 2 * COUNT


def test_blocks_are_returned_of_a_payload_that_never_comes(
    pool: SlabPool, mappings: Mappings
) -> None:
    blocks = [leased(pool).block(3), leased(pool).block(8)]
    mappings.discard(this_process(), blocks)
    assert pool.stats()["slab_leases"] == 0
    mappings.discard(this_process(pid=0), [msgspec.structs.replace(blocks[0], slab=99)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 0},
        {"offset": -4096},
        {"offset": 1 << 40},
        {"nbytes": 0},
        {"nbytes": -5},
        {"nbytes": 1 << 40},
        {"lease": -1},
        {"lease": 1 << 20},
        {"frame": 5},
        {"frame": -1},
        {"slab": 99},
        {"slab_bytes": 8192},
        {"slab_bytes": -1},
    ],
)
def test_a_block_that_cannot_be_is_an_error_where_it_is_read(
    pool: SlabPool, mappings: Mappings, wrong: dict[str, int]
) -> None:
    block = msgspec.structs.replace(leased(pool).block(0), **wrong)
    frames = mappings.attach(this_process(), [block], [])
    with pytest.raises(ProtocolError, match=r"shared memory of 'me' cannot be read: .* shm=False"):
        len(frames)
    with pytest.raises(ProtocolError):
        frames[0]


def test_a_sender_that_is_gone(pool: SlabPool, mappings: Mappings) -> None:
    block = leased(pool).block(0)
    for src, wrong in (
        (this_process(), msgspec.structs.replace(block, fd=10_000)),
        (this_process(pid=1 << 22), block),
    ):
        frames = mappings.attach(src, [wrong], [])
        with pytest.raises(WorkerLostError, match=r"'me' .* ended before what it sent"):
            len(frames)


class Child:
    """A fork of this process that lives until it is told to end."""

    def __init__(self, tensor: torch.Tensor) -> None:
        told, self._tell = os.pipe()
        said, say = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._tell)
            os.read(told, 1)
            os.write(say, bytes([int(tensor[0])]))
            del tensor
            os._exit(0)
        os.close(told)
        os.close(say)
        self._said = said

    def end(self) -> int:
        """Returns what it has read in the tensor."""
        os.close(self._tell)
        os.waitpid(self._pid, 0)
        read = os.read(self._said, 1)[0]
        os.close(self._said)
        return read


def test_a_block_waits_for_the_children_that_may_read_it(
    pool: SlabPool, mappings: Mappings
) -> None:
    tensor = received(mappings, leased(pool, 4))
    first, second = Child(tensor), Child(tensor)
    del tensor
    later = received(mappings, leased(pool, 5))
    assert pool.stats()["slab_leases"] == 2
    del later  # no child has it
    assert pool.stats()["slab_leases"] == 1
    assert second.end() == 4
    mappings.trim()
    assert pool.stats()["slab_leases"] == 1
    assert first.end() == 4
    mappings.trim()
    assert pool.stats()["slab_leases"] == 0


def test_a_fork_costs_nothing_where_nothing_is_shared() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_child_returns_nothing_of_its_parents(pool: SlabPool, mappings: Mappings) -> None:
    tensor = received(mappings, leased(pool, 4))
    assert Child(tensor).end() == 4
    assert pool.stats()["slab_leases"] == 1
    mappings.trim()
    del tensor
    assert pool.stats()["slab_leases"] == 0


def test_a_child_of_which_nothing_is_known_keeps_blocks_for_good(
    pool: SlabPool, mappings: Mappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError("too many open files")

    tensor = received(mappings, leased(pool))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", refuse)
        child = os.fork()
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    try:
        del tensor
        mappings.trim()
        assert pool.stats()["slab_leases"] == 1
    finally:
        forks._living.clear()
        forks._waiting.clear()
