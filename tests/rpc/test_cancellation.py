"""Calls that time out or are cancelled: what becomes of them, and where it can be seen."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.errors import ConfigError, RpcTimeoutError
from tests.rpc import helpers
from tests.rpc.rref_helpers import wait_until

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

W0, W1 = "worker0", "worker1"


def at(worker: str, what: str) -> float:
    return rpc.rpc_sync(worker, helpers.counts)[what]


@pytest.mark.parametrize("way", ["cancelled", "expired"])
def test_a_running_call_shows_until_its_result_is_discarded(way: str) -> None:
    name = f"shows {way}"
    before = helpers.counts(), rpc.rpc_sync(W0, helpers.counts)
    timeout = 3.0 if way == "expired" else 0.0
    future = rpc.rpc_async(W0, helpers.begin_and_wait, (name,), timeout=timeout)
    assert rpc.rpc_sync(W0, helpers.wait_event, (f"{name} has begun",))
    if way == "cancelled":
        assert future.cancel()
    with pytest.raises((concurrent.futures.CancelledError, RpcTimeoutError)):
        future.wait()
    wait_until(lambda: at(W0, "requests_unwanted") == 1, "its mark")
    rpc.rpc_sync(W0, helpers.set_event, (name,))
    wait_until(lambda: at(W0, "requests_unwanted") == 0, "its end")
    assert at(W0, "results_discarded") == before[1]["results_discarded"] + 1
    assert helpers.counts()[f"calls_{way}"] == before[0][f"calls_{way}"] + 1
    assert helpers.counts()["calls_in_flight"] == 0


def test_a_cancelled_task_of_asyncio_cancels_its_call() -> None:
    before = helpers.counts()["calls_cancelled"]

    async def main() -> None:
        future = rpc.rpc_async(W0, helpers.wait_event, ("task",), timeout=0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_value(future), 0.1)
        assert future.cancelled()

    asyncio.run(main())
    assert helpers.counts()["calls_cancelled"] == before + 1
    rpc.rpc_sync(W0, helpers.set_event, ("task",))
    wait_until(lambda: at(W0, "requests_unwanted") == 0, "its end")


async def _value(future: rpc.Future[Any]) -> Any:
    return await future


def test_gradients_of_a_discarded_result_are_let_go() -> None:
    x = torch.ones(3, requires_grad=True)
    future = rpc.rpc_async(W1, helpers.double_when_set, ("graph", x))
    assert rpc.rpc_sync(W1, helpers.wait_event, ("graph has begun",))
    future.cancel()
    rpc.rpc_sync(W1, helpers.set_event, ("graph",))
    wait_until(lambda: at(W1, "requests_unwanted") == 0, "its end")
    wait_until(lambda: at(W1, "graphs") == 0, "the end of its graph")


@pytest.mark.parametrize("none", [0, None, 0.0])
def test_no_time_out(none: float | None) -> None:
    before = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(0.2)
    try:
        assert not rpc.rpc_sync(W0, helpers.wait_event, ("no limit", 0.5), timeout=none)
        rref = rpc.remote(W0, helpers.wait_event, ("no limit", 0.5), timeout=none)
        assert not rref.to_here(timeout=none)
        kept = rpc.remote(W0, helpers.Waiter, timeout=none)
        assert not kept.rpc_sync(timeout=none).wait(0.5)
        assert not kept.rpc_async(timeout=none).wait(0.5).wait()
        assert not kept.remote(timeout=none).wait(0.5).to_here(timeout=none)
        with pytest.raises(RpcTimeoutError):
            kept.rpc_sync().wait(2.0)
    finally:
        rpc._set_rpc_timeout(before)


def test_a_time_out_for_every_kind_of_call() -> None:
    kept = rpc.remote(W0, helpers.Waiter)
    uses: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync(W0, helpers.wait_event, ("kinds", 3.0), timeout=0.1),
        lambda: rpc.rpc_async(W0, helpers.wait_event, ("kinds", 3.0), timeout=0.1).wait(),
        lambda: (
            rpc.remote(W0, helpers.wait_event, ("kinds", 3.0), timeout=0.1)._get_future().wait()
        ),
        lambda: rpc.remote(W0, helpers.wait_event, ("kinds", 3.0)).to_here(timeout=0.1),
        lambda: kept.rpc_sync(timeout=0.1).wait(3.0),
        lambda: kept.rpc_async(timeout=0.1).wait(3.0).wait(),
        lambda: kept.remote(timeout=0.1).wait(3.0)._get_future().wait(),
    ]
    for use in uses:
        with pytest.raises(TimeoutError):
            use()


@pytest.mark.parametrize("wrong", [-2, -0.5, float("nan")])
def test_a_negative_time_out_is_refused(wrong: float) -> None:
    for use in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(ConfigError, match="a time-out is 0 or None"):
            use(W0, helpers.who, timeout=wrong)
    with pytest.raises(ConfigError, match="a time-out is 0"):
        rpc._set_rpc_timeout(wrong)
