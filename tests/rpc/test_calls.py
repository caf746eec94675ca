"""Calling functions on workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import time
from typing import Any

import pytest
import torch

import tensorplay
from tensorplay.distributed import rpc
from tensorplay.errors import (
    CallbackError,
    RemoteError,
    RpcTimeoutError,
    SerializationError,
    WorkerNotFoundError,
)
from tests.rpc import helpers

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_function_runs_on_the_worker_by_name_rank_and_info() -> None:
    info = rpc.get_worker_info("worker1")
    for target in ("worker1", 1, info):
        assert rpc.rpc_sync(target, helpers.who) == "worker1"


def test_arguments_and_results_travel() -> None:
    args, kwargs = rpc.rpc_sync("worker0", helpers.echo, (1, "a"), {"key": [None]})
    assert (args, kwargs) == ((1, "a"), {"key": [None]})


def test_keywords_may_be_called_anything() -> None:
    names = {"to": 1, "func": 2, "timeout": 3, "device": 4, "self": 5}
    assert rpc.rpc_sync("worker0", helpers.echo, (), names)[1] == names


def test_tensors_travel() -> None:
    a, b = torch.rand(3, 4), torch.rand(3, 4)
    assert torch.equal(rpc.rpc_sync("worker0", torch.add, (a, b)), a + b)


def test_a_large_tensor_travels_in_chunks() -> None:
    tensor = torch.rand(5_000_000)
    assert torch.equal(rpc.rpc_sync("worker0", helpers.add, (tensor, 1.0)), tensor + 1.0)


def test_the_callee_sees_the_values_at_the_time_of_the_call() -> None:
    tensor = torch.ones(4_000_000)
    future = rpc.rpc_async("worker0", helpers.fill_and_sum, (tensor,))
    tensor.zero_()
    assert future.wait() == 4_000_000


def test_calls_to_oneself_work_like_any_other() -> None:
    me = rpc.get_worker_info()
    tensor = torch.ones(3)
    future = rpc.rpc_async(me, helpers.add, (tensor, 1))
    tensor.zero_()
    assert future.wait().tolist() == [2.0, 2.0, 2.0]


def test_functions_of_a_notebook_travel_by_value() -> None:
    scale = torch.full((2,), 3.0)

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    assert rpc.rpc_sync("worker0", lambda x: (x * scale).tolist(), (2.0,)) == [6.0, 6.0]
    assert rpc.rpc_sync("worker0", lambda: Local(7).value) == 7


def test_calls_run_at_the_same_time() -> None:
    waiting = rpc.rpc_async("worker0", helpers.wait_event, ("together",))
    rpc.rpc_sync("worker0", helpers.set_event, ("together",))
    assert waiting.wait(30)


def test_many_calls_in_flight() -> None:
    futures = [rpc.rpc_async("worker0", helpers.add, (number, 1)) for number in range(500)]
    assert [future.wait() for future in futures] == list(range(1, 501))


def test_a_remote_exception_keeps_its_type_and_tells_where_it_happened() -> None:
    with pytest.raises(ValueError, match="no good") as caught:
        rpc.rpc_sync("worker0", helpers.fail, ("no good",))
    text = "".join(__import__("traceback").format_exception(caught.value))
    assert "worker0" in text
    assert "in fail" in text


def test_an_exception_that_cannot_be_rebuilt_is_described() -> None:
    def raise_local() -> None:
        class Odd(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__(f"odd {a} {b}")
                self.lock = __import__("threading").Lock()

        raise Odd(1, 2)

    with pytest.raises(RemoteError, match="odd 1 2") as caught:
        rpc.rpc_sync("worker0", raise_local)
    assert "Odd" in caught.value.remote_type
    assert "raise_local" in caught.value.remote_traceback
    assert caught.value.worker == "worker0"


def test_system_exit_does_not_end_the_worker() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises((RemoteError, SystemExit)):
        rpc.rpc_sync("worker0", leave)
    assert rpc.rpc_sync("worker0", helpers.who) == "worker0"


def test_a_result_that_cannot_travel_is_an_error_at_the_caller() -> None:
    with pytest.raises(TypeError, match="generator"):
        rpc.rpc_sync("worker0", helpers.unpicklable)


def test_an_argument_that_cannot_travel_is_named_and_nothing_is_sent() -> None:
    with pytest.raises(SerializationError, match="generator"):
        rpc.rpc_sync("worker0", helpers.echo, ({"rows": [(n for n in range(3))]},))


def test_an_unknown_target_lists_who_is_there() -> None:
    with pytest.raises(WorkerNotFoundError, match=r"nobody.*worker0 \(0\)"):
        rpc.rpc_sync("nobody", helpers.who)
    with pytest.raises(ValueError, match="99"):
        rpc.rpc_sync(99, helpers.who)
    with pytest.raises(ValueError, match="named by"):
        rpc.rpc_sync(1.5, helpers.who)  # type: ignore[arg-type]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_sync("worker0", 3)  # type: ignore[arg-type]


def test_time_out_of_a_call() -> None:
    started = time.monotonic()
    with pytest.raises(RpcTimeoutError, match="RPC ran for more than"):
        rpc.rpc_sync("worker0", helpers.wait_event, ("never", 20.0), timeout=0.2)
    assert time.monotonic() - started < 10
    rpc.rpc_sync("worker0", helpers.set_event, ("never",))


def test_a_timed_out_future_is_a_timeout_error_of_every_kind() -> None:
    future = rpc.rpc_async("worker0", helpers.wait_event, ("kinds", 20.0), timeout=0.1)
    for kind in (TimeoutError, RuntimeError, RpcTimeoutError):
        with pytest.raises(kind):
            future.wait()
    rpc.rpc_sync("worker0", helpers.set_event, ("kinds",))


def test_waiting_with_a_limit_leaves_the_call_alive() -> None:
    future = rpc.rpc_async("worker0", helpers.wait_event, ("limit",))
    with pytest.raises(RpcTimeoutError, match=r"within the 0\.1 s"):
        future.wait(0.1)
    rpc.rpc_sync("worker0", helpers.set_event, ("limit",))
    assert future.wait(30)


def test_the_default_time_out_can_be_changed() -> None:
    before = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(0.2)
    try:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker0", helpers.wait_event, ("default", 20.0))
    finally:
        rpc._set_rpc_timeout(before)
    rpc.rpc_sync("worker0", helpers.set_event, ("default",))


def test_cancel() -> None:
    future = rpc.rpc_async("worker0", helpers.wait_event, ("cancel", 20.0))
    assert future.cancel()
    assert future.cancelled()
    assert not future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.wait()
    rpc.rpc_sync("worker0", helpers.set_event, ("cancel",))


def test_a_cancelled_call_that_has_not_begun_does_not_run() -> None:
    release = [
        rpc.rpc_async("worker2", helpers.wait_event, ("fill", 30.0), timeout=0) for _ in range(64)
    ]
    rpc.rpc_async("worker2", helpers.set_event, ("ran",)).cancel()
    # Runs by the pool's relief, after whatever was queued before it.
    rpc.rpc_sync("worker2", helpers.set_event, ("fill",))
    for future in release:
        future.wait(30)
    assert not rpc.rpc_sync("worker2", helpers.is_set, ("ran",))


def test_await_and_as_completed() -> None:
    async def main() -> list[Any]:
        futures = [rpc.rpc_async("worker0", helpers.add, (n, n)) for n in range(4)]
        return [await future for future in futures]

    assert asyncio.run(main()) == [0, 2, 4, 6]

    async def failing() -> None:
        await rpc.rpc_async("worker0", helpers.fail, ("awaited",))

    with pytest.raises(ValueError, match="awaited"):
        asyncio.run(failing())


def test_then_and_callbacks() -> None:
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()
    future = rpc.rpc_async("worker0", helpers.add, (1, 2))
    doubled = future.then(lambda done: done.wait() * 2)
    future.add_done_callback(lambda done: seen.put(done.value()))
    assert doubled.wait() == 6
    assert future.wait() == 3
    assert seen.get(timeout=30) == 3


def test_what_a_callback_raises_fails_its_future() -> None:
    future = rpc.rpc_async("worker0", helpers.add, (1, 2)).then(lambda done: 1 / 0)
    with pytest.raises(CallbackError, match="ZeroDivisionError") as caught:
        future.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(TypeError, match="Expected a callable"):
        future.then(None)  # type: ignore[arg-type]


def test_a_callback_that_raises_is_logged_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future = rpc.rpc_async("worker0", helpers.wait_event, ("callbacks",))
    future.add_done_callback(lambda done: 1 / 0)  # type: ignore[arg-type]
    following = future.then(lambda done: "went on")
    with caplog.at_level(logging.ERROR):
        rpc.rpc_sync("worker0", helpers.set_event, ("callbacks",))
        assert following.wait(30) == "went on"
    assert "callback" in caplog.text


def test_an_exception_nobody_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    import gc

    future = rpc.rpc_async("worker0", helpers.fail, ("unseen trouble",))
    while not future.done():
        time.sleep(0.01)
    with caplog.at_level(logging.ERROR):
        del future
        gc.collect()
    assert "unseen trouble" in caplog.text


def test_async_execution_frees_the_thread() -> None:
    futures = [rpc.rpc_async("worker0", helpers.later, ("go",)) for _ in range(100)]
    rpc.rpc_sync("worker0", helpers.set_event, ("go",))
    assert all(future.wait(30) == "go True" for future in futures)  # type: ignore[comparison-overlap]


def test_async_execution_needs_a_future() -> None:
    with pytest.raises(
        TypeError, match=r"must return a torch\.futures\.Future object.*not_a_future returned int"
    ):
        rpc.rpc_sync("worker0", helpers.not_a_future)


def test_nested_calls_between_two_workers_never_run_out_of_threads() -> None:
    assert rpc.rpc_sync("worker0", helpers.nest, (["worker0", "worker1"], 200)) == 200


def test_a_callee_may_call_its_caller_back() -> None:
    me = rpc.get_worker_info().name
    assert rpc.rpc_sync("worker0", helpers.nest, ([me, "worker0"], 10)) == 10


def test_wait_all_collects_what_is_called_within() -> None:
    with rpc._wait_all():
        future = rpc.rpc_async("worker0", helpers.add, (1, 1))
    assert future.done()
    with pytest.raises(ValueError, match="inside"), rpc._wait_all():
        rpc.rpc_async("worker0", helpers.fail, ("inside",))


def test_who_is_there() -> None:
    peers = {peer.name: peer for peer in rpc.list_workers()}
    assert {"worker0", "worker1", "worker2"} <= set(peers)
    assert peers["worker1"].id == 1
    assert peers["worker1"].versions["torch"] == torch.__version__
    assert peers["worker1"].versions["tensorplay"] == tensorplay.__version__
    assert rpc.get_worker_info().id < 0


def test_waiting_for_somebody_who_does_not_come() -> None:
    assert rpc.wait_for_workers(["worker0", 1], timeout=5)[1].name == "worker1"
    with pytest.raises(WorkerNotFoundError, match=r"\['later'\] did not come within"):
        rpc.wait_for_workers(["worker0", "later"], timeout=0.1)


def test_a_pickler_of_ones_own() -> None:
    """Both processes use it: here the client calls itself."""

    class Counting:
        def __init__(self) -> None:
            self.used: list[str] = []

        def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
            self.used.append("serialize")
            return rpc.internal.serialize(obj)

        def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
            self.used.append("deserialize")
            return rpc.internal.deserialize(binary_data, tensor_table)

    pickler, me = Counting(), rpc.get_worker_info()
    with rpc._use_rpc_pickler(pickler):
        assert torch.equal(rpc.rpc_sync(me, helpers.add, (torch.ones(2), 1)), torch.full((2,), 2.0))
    assert sorted(pickler.used) == ["deserialize"] * 2 + ["serialize"] * 2
    assert rpc.rpc_sync(me, helpers.add, (1, 1)) == 2
    assert len(pickler.used) == 4
