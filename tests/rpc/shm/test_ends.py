"""Processes that end, however they do, with memory shared."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import WorkerLostError

from . import helpers

Start = Callable[..., LocalCluster]
COUNT = 1 << 20


def sync(function: Callable[..., Any], *args: Any, to: str = "worker0") -> Any:
    return rpc.rpc_sync(to, function, args=args, timeout=30)


def left(worker: str) -> threading.Event:
    """Returns an event that is set when a worker has gone and is forgotten."""
    gone = threading.Event()
    rpc._get_current_rpc_agent().on_peer_left(
        lambda departure: gone.set() if departure.peer.name == worker else None
    )
    return gone


def nothing_is_left() -> bool:
    gc.collect()
    return not helpers.mapped_slabs() and not helpers.slab_descriptors()


def test_a_killed_receiver_leaves_nothing(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    helpers.share_with("worker0")
    for number in range(4):
        sync(helpers.keep, f"kept{number}", torch.ones(COUNT))
    assert helpers.stats()["slab_leases"] >= 4
    gone = left("worker0")
    cluster.kill("worker0")
    assert gone.wait(20)
    stats = helpers.stats()
    assert (stats["slabs"], stats["slab_leases"], stats["slab_peers"]) == (0, 0, 0)
    helpers.share_with("worker1")
    assert helpers.stats()["slab_peers"] == 1
    # One that is started anew under its name is another peer.
    cluster.start_worker("worker0")
    helpers.share_with("worker0")
    assert sync(helpers.keep, "again", torch.ones(COUNT)) == COUNT


def test_a_killed_sender_leaves_its_tensors_and_nothing_else(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    helpers.share_with("worker0")
    tensors = [sync(helpers.full, COUNT, float(value)) for value in range(4)]
    assert helpers.stats()["slabs_mapped"] >= 1
    gone = left("worker0")
    cluster.kill("worker0")
    assert gone.wait(20)
    assert helpers.stats()["slabs_mapped"] == 0
    assert [float(tensor.sum()) for tensor in tensors] == [value * COUNT for value in range(4)]
    tensors[0].fill_(7.0)
    assert tensors[1].sum() == COUNT
    rpc.shutdown(graceful=False)
    assert helpers.mapped_slabs()
    del tensors
    assert nothing_is_left()


def test_killed_in_the_middle(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    helpers.share_with("worker0")
    sent = torch.ones(4 * COUNT)
    futures = [rpc.rpc_async("worker0", helpers.echo, args=(sent,)) for _ in range(20)]
    futures[2].wait()
    cluster.kill("worker0")
    ended = 0
    for future in futures:
        try:
            assert future.wait().sum() == 4 * COUNT
        except WorkerLostError:
            ended += 1
    assert ended
    del futures, future
    rpc.shutdown(graceful=False)
    assert nothing_is_left()


def test_tensors_outlive_the_agents(own_cluster: Start) -> None:
    own_cluster(workers=1)
    helpers.share_with("worker0")
    got = sync(helpers.full, COUNT, 2.0)
    view = got[5:]
    del got
    rpc.shutdown(graceful=False)
    assert view.sum() == 2.0 * (COUNT - 5)
    assert len(helpers.mapped_slabs()) == 1
    del view
    assert nothing_is_left()


def test_the_last_result_of_one_that_leaves(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    helpers.share_with("worker0")
    future = rpc.rpc_async("worker0", helpers.end_and_answer, args=(5 * COUNT,))
    assert future.wait().sum() == 5 * COUNT
    assert cluster.wait_ended("worker0") == 0


@pytest.mark.parametrize(("here", "there"), [(False, True), (True, False)])
def test_one_side_that_does_without_is_enough(own_cluster: Start, here: bool, there: bool) -> None:
    cluster = own_cluster(workers=0, options=rpc.BrokerRpcBackendOptions(shm=here))
    cluster.start_worker("worker0", shm=there)
    for _ in range(3):
        got = sync(helpers.echo, torch.ones(COUNT))
    assert got.sum() == COUNT
    for stats in (helpers.stats(), sync(helpers.stats)):
        assert (stats["slabs"], stats["slabs_mapped"], stats["slab_peers"]) == (0, 0, 0)


def test_without_room_tensors_travel_as_frames(own_cluster: Start) -> None:
    own_cluster(workers=1, options=rpc.BrokerRpcBackendOptions(shm_limit="3MiB"))
    helpers.share_with("worker0")
    for size in (COUNT // 8, COUNT, COUNT // 8):
        got = sync(helpers.echo, [torch.full((size,), float(size)) for _ in range(3)])
        assert all((tensor == size).all() for tensor in got)
    assert helpers.stats()["slab_bytes"] <= 3 << 20


def test_thousands_of_large_transfers_do_not_add_up(own_cluster: Start) -> None:
    own_cluster(workers=1)
    helpers.share_with("worker0")
    sent = torch.ones(4 * COUNT)
    for _ in range(10):
        sync(helpers.echo, sent)
    before = [helpers.stats(), sync(helpers.stats)]
    memory = sync(resident)
    for _ in range(2000):
        sync(helpers.echo, sent)
    for stats, earlier in zip([helpers.stats(), sync(helpers.stats)], before, strict=True):
        # A thread that is late to let go of its tensors has a further slab made, no more.
        assert stats["slab_bytes"] <= earlier["slab_bytes"] + 4 * sent.nbytes
        assert stats["slab_leases"] <= 2
    assert sync(resident) < memory + (64 << 20)


def resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
