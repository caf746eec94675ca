"""References on real processes: whose they are, how they travel, when objects are freed."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.errors import RpcTimeoutError, RRefError, SerializationError
from tests.rpc import rref_helpers as helpers
from tests.rpc.rref_helpers import Box, Holder, Tracked, wait_until

pytestmark = pytest.mark.usefixtures("cluster")

W0, W1, W2 = "worker0", "worker1", "worker2"


@pytest.fixture(autouse=True)
def _nothing_stays_counted(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Every test leaves all tables empty, on this process and on the workers."""
    # Records of failed calls would hold the frames in which they failed.
    caplog.set_level(logging.ERROR, "tensorplay.distributed.rpc.callee")
    yield
    helpers.check_nothing_is_left(cluster.workers)


def live(worker: str) -> int:
    return int(rpc.rpc_sync(worker, helpers.live))


# Whose it is.


def test_a_user_knows_the_owner() -> None:
    rref = rpc.remote(W0, Tracked, (7,))
    assert rref.owner() == rpc.get_worker_info(W0)
    assert rref.owner_name() == W0
    assert not rref.is_owner()
    assert rref.to_here().value == 7
    rref._get_future().wait()
    assert rref.confirmed_by_owner()


def test_a_local_object_is_owned_here() -> None:
    value = Tracked(3)
    rref = rpc.RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == rpc.get_worker_info()
    assert rref.to_here() is value
    assert rref.local_value() is value
    assert helpers.counts()["num_owner_rrefs"] == 0, "nobody else has it"


def test_it_is_subscriptable_as_a_type() -> None:
    def takes(rref: rpc.RRef[int]) -> int:
        return rref.to_here()

    assert takes(rpc.RRef[int](3)) == 3
    assert rpc.RRef(3, type_hint=int).to_here() == 3


def test_references_are_equal_by_identity() -> None:
    first, second = rpc.RRef(1), rpc.RRef(1)
    assert first != second
    assert len({first, second, first}) == 2


def test_a_reference_to_this_process_is_owned_here() -> None:
    rref = rpc.remote(rpc.get_worker_info(), Tracked, (5,))
    assert rref.is_owner()
    assert rref.to_here().value == 5
    assert rref.local_value() is rref.to_here()


def test_what_a_reference_looks_like() -> None:
    me = rpc.get_worker_info().id
    assert str(rpc.RRef(1)).startswith(f"OwnerRRef(GloballyUniqueId(created_on={me}, local_id=")
    rref = rpc.remote(W0, Tracked)
    assert repr(rref).startswith(f"UserRRef(RRefId = GloballyUniqueId(created_on={me}, local_id=")
    assert f"ForkId = GloballyUniqueId(created_on={me}, local_id=" in str(rref)


def test_the_value_is_local_to_the_owner() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    with pytest.raises(RRefError, match=r"Cannot call localValue\(\) on a non-local.*worker0"):
        rref.local_value()


# Getting the object.


def test_an_error_is_raised_at_use() -> None:
    rref = rpc.remote(W0, helpers.raise_with, (1,))
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            rref.to_here()
    assert not rref.confirmed_by_owner()
    with pytest.raises(ValueError, match="refused"):
        rpc.rpc_sync(W1, helpers.fetch, (rref,))
    with pytest.raises(ValueError, match="refused"):
        rref._get_future().wait()


def test_an_error_of_this_process_is_raised_at_use() -> None:
    rref = rpc.remote(rpc.get_worker_info(), helpers.raise_with, (1,))
    with pytest.raises(ValueError, match="refused"):
        rref.to_here()


def test_an_argument_that_cannot_travel_is_refused_at_once() -> None:
    for worker in (W0, rpc.get_worker_info().name):
        with pytest.raises(SerializationError):
            rpc.remote(worker, helpers.double, ((n for n in range(3)),))


def test_the_object_is_waited_for() -> None:
    rref = rpc.remote(W0, helpers.gated, ("value",))
    assert not rref.confirmed_by_owner()
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.1)
    rpc.rpc_sync(W0, helpers.open_gate)
    assert rref.to_here() == "value"
    assert rref.to_here(timeout=0) == "value"


def test_a_local_object_is_waited_for() -> None:
    helpers.close_gate()
    rref = rpc.remote(rpc.get_worker_info(), helpers.gated, ("value",))
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.1)
    helpers.open_gate()
    assert rref.local_value() == "value"


def test_a_creation_that_timed_out_says_so() -> None:
    rref = rpc.remote(W0, helpers.gated, ("value",), timeout=0.1)
    with pytest.raises(RpcTimeoutError, match="RPC ran for more than"):
        rref._get_future().wait()
    with pytest.raises(RpcTimeoutError, match="RRef creation"):
        rref.to_here()


def test_a_request_may_be_overtaken_by_its_reference() -> None:
    """A large request travels in pieces; smaller ones pass between them."""
    for _ in range(3):
        rref = rpc.remote(W0, helpers.size, (torch.ones(4 << 20),))
        other = rpc.rpc_async(W1, helpers.fetch, (rref,))
        assert rref.to_here() == 4 << 20
        assert other.wait() == 4 << 20


# How it travels.


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda rref: [rref], "0"),
        (lambda rref: (1, {"a": [rref]}), "1/a/0"),
        (lambda rref: Box(rref), "content"),
        (lambda rref: Box(None, [Box(rref)]), "more/0/content"),
        (lambda rref: Holder(rref), "rref"),
        (lambda rref: torch.nn.Sequential(Holder(rref)), "0/rref"),
        (lambda rref: lambda: rref, "()"),
        (lambda rref: functools.partial(helpers.double, rref), "args/0"),
        (lambda rref: rref.to_here, "__self__"),
    ],
    ids=["list", "dict", "dataclass", "nested", "module", "child", "closure", "partial", "method"],
)
def test_it_travels_inside_anything(wrap: Any, path: str) -> None:
    rref = rpc.remote(W0, helpers.double, (21,))
    assert rpc.rpc_sync(W1, helpers.dig, (wrap(rref), path)) == 42
    assert rpc.rpc_sync(W0, helpers.dig, (wrap(rref), path)) == 42


def test_it_comes_back_as_a_result() -> None:
    rref = rpc.rpc_sync(W0, helpers.own, (9,))
    assert rref.owner_name() == W0
    assert rref.to_here().value == 9
    assert rpc.rpc_sync(W1, helpers.remote_of, (W2, 4)).to_here().value == 4


def test_references_to_references() -> None:
    nested = rpc.remote(W0, helpers.own_many, (20,))
    assert [rref.to_here().value for rref in nested.to_here()] == list(range(20))
    assert [r.to_here().value for r in rpc.rpc_sync(W1, helpers.fetch, (nested,))] == list(
        range(20)
    )


def test_one_message_counts_a_reference_once() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    first, second = rpc.rpc_sync(W1, helpers.double, ([rref],))
    assert first.owner() == second.owner()
    copies = [rref, rpc.rpc_sync(W1, helpers.double, ([rref],))[0]]
    assert rpc.rpc_sync(W2, helpers.dig, (copies, "1")).value == 1


def test_it_goes_home_as_the_object_itself() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    [other, _] = rpc.rpc_sync(W1, helpers.double, ([rref],))
    assert rpc.rpc_sync(W0, helpers.is_same, (rref, other))
    mine = rpc.RRef(Tracked(2))
    [back, again] = rpc.rpc_sync(W0, helpers.double, ([mine],))
    assert back.local_value() is mine.local_value()
    assert again.is_owner()


def test_it_is_confirmed_wherever_it_arrives() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    assert rpc.rpc_sync(W1, helpers.confirmed, (rref,))
    assert rpc.rpc_sync(W0, helpers.confirmed, (rref,))


def test_it_is_handed_round() -> None:
    mine = rpc.RRef(Tracked(6))
    for rref in (mine, rpc.remote(W0, Tracked, (6,))):
        route = [W0, W1, W2, W0, W1, rpc.get_worker_info().name, W2]
        assert helpers.pass_on(rref, route) == 6


@pytest.mark.parametrize(
    "attempt",
    [
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda rref: copy.deepcopy([rref]),
        lambda rref: torch.save(rref, io.BytesIO()),
        lambda rref: rref._serialize(),
        lambda rref: rpc.RRef._deserialize((1, 2, 3, "worker0", 0)),
        lambda rref: rpc.internal.serialize(rref),
    ],
    ids=["dumps", "copy", "deepcopy", "nested", "save", "serialize", "deserialize", "internal"],
)
def test_only_calls_can_pickle_it(attempt: Any) -> None:
    for rref in (rpc.RRef(35), rpc.remote(W0, Tracked)):
        with pytest.raises(RRefError, match="Can not pickle rref in python pickler, rref can"):
            attempt(rref)


# When the object is freed.


def test_the_owner_frees_what_its_only_user_drops() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    rref.to_here()
    assert live(W0) == 1
    del rref
    wait_until(lambda: live(W0) == 0, "the end of the object")


def test_it_lives_with_a_third_process() -> None:
    rref = rpc.remote(W0, Tracked, (5,))
    rpc.rpc_sync(W1, helpers.keep, ("x", rref))
    rpc.rpc_sync(W2, helpers.keep, ("x", rref))
    del rref
    rpc.rpc_sync(W1, helpers.forget, ("x",))
    wait_until(lambda: rpc.rpc_sync(W1, helpers.counts)["num_user_rrefs"] == 0, "its end there")
    assert rpc.rpc_sync(W2, helpers.fetch_kept, ("x",)).value == 5
    assert live(W0) == 1
    rpc.rpc_sync(W2, helpers.forget, ("x",))
    wait_until(lambda: live(W0) == 0, "the end of the object")


def test_an_object_of_this_process_lives_with_its_users() -> None:
    rpc.rpc_sync(W0, helpers.keep, ("x", rpc.RRef(Tracked(8))))
    assert helpers.live() == 1
    assert helpers.counts()["num_owner_rrefs"] == 1
    assert rpc.rpc_sync(W0, helpers.fetch_kept, ("x",)).value == 8
    rpc.rpc_sync(W0, helpers.forget, ("x",))
    wait_until(lambda: helpers.live() == 0, "the end of the object")


def test_a_local_reference_outlives_its_users() -> None:
    rref = rpc.RRef(Tracked(8))
    for _ in range(3):  # counted, freed of counts, counted again
        rpc.rpc_sync(W0, helpers.keep, ("x", rref))
        rpc.rpc_sync(W0, helpers.forget, ("x",))
        wait_until(lambda: helpers.counts()["num_owner_rrefs"] == 0, "the end of the counts")
        assert rref.local_value().value == 8
    assert rpc.rpc_sync(W1, helpers.fetch, (rref,)).value == 8


def test_what_is_dropped_before_it_is_made_is_freed() -> None:
    rref = rpc.remote(W0, helpers.gated, (Tracked(1),))
    del rref
    rpc.rpc_sync(W0, helpers.open_gate)
    wait_until(lambda: live(W0) == 0, "the end of the object")


@pytest.mark.parametrize("worker", [W1, W0], ids=["to a third", "home"])
def test_a_reference_in_flight_is_enough(worker: str) -> None:
    for value in range(30):
        future = rpc.rpc_async(worker, helpers.fetch, (rpc.remote(W0, Tracked, (value,)),))
        assert future.wait().value == value


def test_failed_calls_leave_no_counts() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    for worker in (W0, W1, rpc.get_worker_info().name):
        with pytest.raises(SerializationError):  # the arguments cannot travel
            rpc.rpc_sync(worker, helpers.double, ([rref, (n for n in range(3))],))
        with pytest.raises(SerializationError):  # the result cannot
            rpc.rpc_sync(worker, helpers.with_generator, (rref,))
        with pytest.raises(ValueError, match="refused"):
            rpc.rpc_sync(worker, helpers.raise_with, (rref,))


def test_abandoned_calls_leave_no_counts() -> None:
    rref = rpc.remote(W0, Tracked, (1,))
    late = [rpc.rpc_async(w, helpers.gated, (rref,), timeout=0.2) for w in (W0, W1, W2)]
    cancelled = [rpc.rpc_async(w, helpers.gated, (rref,)) for w in (W0, W1, W2)]
    for future in cancelled:
        assert future.cancel()
    for future in late:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    for worker in (W0, W1, W2):
        rpc.rpc_sync(worker, helpers.open_gate)


def test_references_may_be_dropped_anywhere_at_any_time() -> None:
    """By many threads and by the garbage collector, while calls go on."""
    failures: list[BaseException] = []

    def churn(worker: str) -> None:
        try:
            for n in range(25):
                rref = rpc.remote(worker, Tracked, (n,))
                cycle: list[Any] = [rref]
                cycle.append(cycle)
                assert rpc.rpc_sync(W2, helpers.fetch, (rref,)).value == n
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(worker,)) for worker in (W0, W1) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            gc.collect()
            thread.join(0.02)
    assert not failures


def test_many_users_share_one_object() -> None:
    rref = rpc.remote(W0, Tracked, (0,))
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(
            lambda n: rpc.rpc_sync((W1, W2)[n % 2], helpers.pass_on, (rref, [W0, W1])), range(60)
        )
        assert set(results) == {0}


# Backward.


def test_backward_of_a_local_tensor() -> None:
    x = torch.rand(3, requires_grad=True)
    rpc.RRef((x * 2).sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with pytest.raises(RRefError, match=r"RRef should contain a tensor for \.backward\(\)"):
        rpc.RRef("foo").backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        rpc.RRef(torch.rand(10)).backward()


def test_backward_at_another_process_needs_a_context() -> None:
    rref = rpc.remote(W0, torch.ones, (2,))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id'"):
        rref.backward()
