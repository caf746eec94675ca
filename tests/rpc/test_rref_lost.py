"""References when processes die, leave, or shut down."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import NotInitializedError, OwnerLostError
from tests.rpc import rref_helpers as helpers
from tests.rpc.rref_helpers import Tracked, wait_until

W0, W1, W2 = "worker0", "worker1", "worker2"

Start = Callable[..., LocalCluster]


def live(worker: str) -> int:
    return int(rpc.rpc_sync(worker, helpers.live))


def gone(worker: str) -> bool:
    return worker not in [peer.name for peer in rpc.list_workers()]


def test_a_dead_users_references_are_dropped(own_cluster: Start) -> None:
    cluster = own_cluster(workers=3)
    before = helpers.live()
    rref = rpc.remote(W0, Tracked, (1,))
    mine = rpc.RRef(Tracked(2))
    rpc.rpc_sync(W1, helpers.keep, ("x", [rref, mine]))
    rpc.rpc_sync(W2, helpers.keep, ("x", rref))
    del rref, mine
    assert live(W0) == 1
    assert helpers.live() == before + 1
    cluster.kill(W1)
    wait_until(lambda: helpers.live() == before, "the end of this process's object")
    assert rpc.rpc_sync(W2, helpers.fetch_kept, ("x",)).value == 1
    cluster.kill(W2)
    wait_until(lambda: live(W0) == 0, "the end of the worker's object")
    assert not any(rpc.rpc_sync(W0, helpers.counts).values())
    gc.collect()
    assert not any(helpers.counts().values())


def test_a_lost_owner_is_an_error_at_once(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    rref = rpc.remote(W0, Tracked, (1,))
    rref.to_here()
    pending = rpc.remote(W0, helpers.gated, (1,))
    cluster.kill(W0)
    for lost in (rref, pending):  # the first may learn of it while it waits
        with pytest.raises(OwnerLostError, match=r"worker 'worker0'.*is gone"):
            lost.to_here()
    wait_until(lambda: gone(W0), "its end")
    uses: list[Callable[[], object]] = [
        rref.to_here,
        rref.rpc_sync().get,
        rref.rpc_async().get,
        rref.remote().get,
        rref._get_type,
    ]
    for use in uses:
        begun = time.monotonic()
        with pytest.raises(OwnerLostError, match=r"worker 'worker0'.*is gone"):
            use()
        assert time.monotonic() - begun < 1.0
    assert rref.owner_name() == W0
    assert repr(rref).startswith("UserRRef(")
    with pytest.raises(OwnerLostError):
        rpc.rpc_sync(W1, helpers.fetch, (rref,))
    del rref, pending, lost, use, uses
    gc.collect()
    wait_until(lambda: not any(helpers.counts().values()), "the end of all counts")


def test_calls_that_still_run_may_use_references(
    own_cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cluster(workers=1)
    helpers.close_gate()
    helpers.keep("x", rpc.remote(W0, Tracked, (4,)))
    running = rpc.rpc_async("client", helpers.gated_fetch, ("x",))
    agent = rpc._get_current_rpc_agent()
    drain = agent.drain

    def open_and_drain(timeout: float | None) -> bool:
        helpers.open_gate()
        return drain(timeout)

    monkeypatch.setattr(agent, "drain", open_and_drain)
    try:
        rpc.shutdown()
        assert running.wait().value == 4
    finally:
        helpers.kept.clear()


def test_references_are_void_after_shutdown(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    rref = rpc.remote(W0, Tracked, (1,))
    mine = rpc.RRef(3)
    assert rref.to_here().value == 1
    rpc.shutdown()
    with pytest.raises(NotInitializedError, match=r"Cannot call to_here\(\) on it after deletion"):
        rref.to_here()
    with pytest.raises(NotInitializedError, match="Cannot call fork an UserRRef after deletion"):
        rpc.internal.serialize(rref)
    with pytest.raises(NotInitializedError, match="after deletion"):
        rref.rpc_sync().get()
    with pytest.raises(NotInitializedError):
        rpc.RRef(1)
    assert mine.local_value() == 3, "it is here, with or without an agent"

    rpc.init_rpc("again", broker=cluster.address)
    try:
        with pytest.raises(NotInitializedError, match="after deletion"):
            rref.to_here()
        for old in (rref, mine):
            with pytest.raises(NotInitializedError):
                rpc.rpc_sync(W0, helpers.double, (old,))
        wait_until(lambda: live(W0) == 0, "the end of the object")
    finally:
        rpc.shutdown()
