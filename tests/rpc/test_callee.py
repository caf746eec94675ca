"""Requests whose callers stop waiting, before they begin and while they run; no sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tensorplay.distributed.rpc import payload
from tensorplay.distributed.rpc.callee import Callee
from tensorplay.distributed.rpc.inbound import Message
from tensorplay.distributed.rpc.meters import Meters
from tensorplay.protocol.calls import Op, Reply, Request, Status
from tensorplay.protocol.messages import Kind, PeerInfo, Role, Route
from tensorplay.protocol.refs import RRefKey

ME = PeerInfo("me", 0, 11, Role.WORKER)
CALLER = PeerInfo("caller", -2, 22, Role.CLIENT)
OTHER = PeerInfo("other", -3, 33, Role.CLIENT)
KEY = RRefKey(22, 1)

ran: list[int] = []


class Driver:
    """A callee whose pool runs what the test says."""

    def __init__(self) -> None:
        ran.clear()
        self.queue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.replies: list[tuple[int, Reply]] = []
        self.credit = 0
        self.rrefs = Mock()
        self.rrefs.exporter.return_value.tokens = []
        shared = Mock()
        shared.leases_for.return_value = None
        pool = Mock()
        pool.submit = lambda function, *args: self.queue.append((function, args))
        self.meters = Meters()
        rules = Mock()
        rules.of_request.return_value = None
        self.callee = Callee(
            ME, self.rrefs, pool, self._reply, self._consumed, shared, self.meters, rules
        )

    def request(
        self,
        id: int,
        function: Callable[[int], Any],
        *,
        op: Op = Op.CALL,
        timeout: float = 0.0,
        src: PeerInfo = CALLER,
    ) -> None:
        route = Route(Kind.REQUEST, ME.incarnation, src.incarnation, id)
        header = Request(op, timeout=timeout, rref=KEY if op is Op.REMOTE else None)
        message = Message(route, header, payload.pack((function, (id,), {})), credit=100)
        self.callee.accept(message, src)

    def run(self) -> None:
        while self.queue:
            function, args = self.queue.pop(0)
            function(*args)

    def counts(self) -> tuple[int, int, int, int]:
        meters, callee = self.meters, self.callee
        return meters.dropped, meters.discarded, callee.unwanted(), len(callee)

    def _reply(self, dst: int, id: int, reply: Reply, frames: Any) -> None:
        self.replies.append((id, reply))

    def _consumed(self, src: int, size: int) -> None:
        self.credit += size


@pytest.fixture
def driver() -> Driver:
    return Driver()


def note(id: int) -> int:
    ran.append(id)
    return id


def test_a_call_is_answered(driver: Driver) -> None:
    driver.request(1, note)
    driver.run()
    assert ran == [1]
    assert [id for id, _ in driver.replies] == [1]
    assert driver.counts() == (0, 0, 0, 0)
    driver.callee.cancel(CALLER.incarnation, 1)  # comes too late
    assert driver.counts() == (0, 0, 0, 0)


def test_a_cancelled_call_leaves_the_queue_at_once(driver: Driver) -> None:
    for id in (1, 2, 3):
        driver.request(id, note)
    driver.callee.cancel(CALLER.incarnation, 2)
    driver.callee.cancel(CALLER.incarnation, 2)
    assert driver.credit == 100  # what it holds is let go before the pool comes to it
    assert driver.counts() == (1, 0, 0, 2)
    driver.run()
    assert ran == [1, 3]
    assert [id for id, _ in driver.replies] == [1, 3]
    assert driver.credit == 300
    assert driver.counts() == (1, 0, 0, 0)


def test_a_call_whose_time_is_up_does_not_begin(driver: Driver) -> None:
    driver.request(1, note, timeout=1e-6)
    driver.request(2, note, timeout=60.0)
    driver.run()
    assert ran == [2]
    assert driver.counts() == (1, 0, 0, 0)


@pytest.mark.parametrize("raises", [False, True])
def test_the_result_of_a_call_that_is_cancelled_meanwhile_is_discarded(
    driver: Driver, raises: bool
) -> None:
    seen = []

    def cancelled(id: int) -> int:
        driver.callee.cancel(CALLER.incarnation, id)
        seen.append(driver.counts())
        if raises:
            raise LookupError
        return id

    _pass_by_reference(driver, 1, cancelled)
    driver.run()
    assert seen == [(0, 0, 1, 1)]
    assert driver.replies == []
    assert driver.counts() == (0, 1, 0, 0)


def test_a_result_that_comes_later_is_discarded_too(driver: Driver) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()

    def later(id: int) -> torch.futures.Future[int]:
        return future

    later._wrapped_async_rpc_function = True  # type: ignore[attr-defined]
    _pass_by_reference(driver, 1, later)
    driver.run()
    driver.callee.cancel(CALLER.incarnation, 1)
    assert driver.counts() == (0, 0, 1, 1)
    future.set_result(3)
    driver.run()
    assert driver.replies == []
    assert driver.counts() == (0, 1, 0, 0)


def test_a_reference_learns_that_its_function_was_not_run(driver: Driver) -> None:
    driver.request(1, note, op=Op.REMOTE)
    driver.callee.cancel(CALLER.incarnation, 1)
    driver.run()
    assert ran == []
    driver.rrefs.fail.assert_called_once()
    assert [(id, reply.status) for id, reply in driver.replies] == [(1, Status.ERROR)]
    assert driver.counts() == (1, 0, 0, 0)


def test_a_reference_gets_its_object_though_its_creator_gave_up(driver: Driver) -> None:
    def cancelled(id: int) -> int:
        driver.callee.cancel(CALLER.incarnation, id)
        return id

    _pass_by_reference(driver, 1, cancelled, op=Op.REMOTE)
    driver.run()
    driver.rrefs.fulfil.assert_called_once_with(KEY, 1)
    assert driver.counts() == (0, 0, 0, 0)


def test_the_calls_of_a_peer_that_is_gone_are_dropped(driver: Driver) -> None:
    driver.request(1, note)
    driver.request(2, note, src=OTHER)
    driver.request(3, note)
    driver.callee.peer_left(CALLER.incarnation)
    assert driver.counts() == (2, 0, 0, 1)
    driver.run()
    assert ran == [2]
    assert driver.callee.wait_idle(0.0)


_functions: dict[int, Callable[[int], Any]] = {}


def _call(id: int) -> Any:
    return _functions[id](id)


def _pass_by_reference(
    driver: Driver, id: int, function: Callable[[int], Any], **options: Any
) -> None:
    """Requests a function of this test, which is not to travel as a copy."""
    _functions[id] = function
    chosen: Any = _call
    if hasattr(function, "_wrapped_async_rpc_function"):
        chosen = _call_later
    driver.request(id, chosen, **options)


def _call_later(id: int) -> Any:
    return _functions[id](id)


_call_later._wrapped_async_rpc_function = True  # type: ignore[attr-defined]
