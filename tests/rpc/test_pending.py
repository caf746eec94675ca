"""Calls in flight, at the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tensorplay.distributed.rpc.calls import CallTable, Failed, PendingCall
from tensorplay.errors import RpcTimeoutError
from tensorplay.protocol.messages import PeerInfo

PEER = PeerInfo("worker", 0, 7)


def pending(
    table: CallTable, decode: Callable[[Any, Any], Any] = lambda call, raw: raw
) -> PendingCall:
    def give_up(call: PendingCall) -> None:
        table.pop(call.id)

    return PendingCall(table.next_id(), PEER, len, decode, give_up)


def test_a_reply_that_nobody_waits_for_is_decoded_by_the_pool() -> None:
    call = pending(CallTable())
    submitted: list[Callable[[], object]] = []
    call.arrive(3, submitted.append)
    assert not call.future.done()
    submitted[0]()
    assert call.future.done()
    assert call.future.wait() == 3


def test_who_comes_first_decodes() -> None:
    decoded: list[int] = []

    def decode(call: Any, raw: Any) -> Any:
        decoded.append(raw)
        return raw

    call = pending(CallTable(), decode)
    submitted: list[Callable[[], object]] = []
    call.arrive(3, submitted.append)
    assert call.future.wait() == 3
    submitted[0]()
    assert decoded == [3]


def test_who_waits_decodes_and_the_others_wait_for_that() -> None:
    call = pending(CallTable())
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(call.future.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    while call._waiter is None:
        threads[0].join(0.001)
    call.arrive(3, lambda settle: pytest.fail("somebody waits"))
    for thread in threads:
        thread.join(10)
    assert got == [3, 3, 3]


def test_waiting_while_another_decodes() -> None:
    decoding, go = threading.Event(), threading.Event()

    def decode(call: Any, raw: Any) -> Any:
        decoding.set()
        go.wait(10)
        return raw

    call = pending(CallTable(), decode)
    call.arrive(3, lambda settle: threading.Thread(target=settle).start())
    assert decoding.wait(10)
    with pytest.raises(RpcTimeoutError):
        call.future.wait(0.01)
    go.set()
    assert call.future.wait(10) == 3


def test_an_error_is_raised_by_the_future() -> None:
    call = pending(CallTable(), lambda call, raw: Failed(ValueError("odd")))
    call.arrive(1, lambda settle: settle())
    with pytest.raises(ValueError, match="odd"):
        call.future.wait()


def test_a_cancelled_call_leaves_the_table_and_still_decodes_what_comes() -> None:
    table = CallTable()
    decoded: list[int] = []
    call = pending(table, lambda call, raw: decoded.append(raw))
    table.add(call)
    assert call.future.cancel()
    assert len(table) == 0
    call.arrive(3, lambda settle: settle())
    assert decoded == [3]
    assert call.future.cancelled()


def test_a_future_holds_its_call_no_longer_than_needed() -> None:
    call = pending(CallTable())
    call.kept = object()
    call.arrive(3, lambda settle: settle())
    assert call.future._call is None
    assert call.kept is None


def test_deadlines() -> None:
    table = CallTable()
    calls = [pending(table) for _ in range(3)]
    for number, timeout in enumerate((30.0, 10.0, 0.0)):
        table.add(calls[number], timeout)
    first = table.next_deadline()
    assert table.expired(first - 1) == []
    assert table.expired(first) == [calls[1]]
    assert table.expired(first) == []
    assert table.next_deadline() > first
    assert table.pop(calls[0].id) is calls[0]
    assert table.pop(calls[0].id) is None
    assert table.next_deadline() == float("inf")
    assert len(table) == 1


def test_deadlines_of_calls_that_ended_are_not_kept() -> None:
    table = CallTable()
    slow = pending(table)
    table.add(slow, 1.0)
    for _ in range(5000):
        call = pending(table)
        table.add(call, 60.0)
        table.pop(call.id)
    assert len(table._deadlines) < 2000
    assert table.expired(float("inf")) == [slow]


def test_calls_by_callee() -> None:
    table = CallTable()
    call = pending(table)
    table.add(call)
    assert table.pop_if_to(call.id, 8) is None
    assert table.to(8) == []
    assert table.pop_if_to(call.id, 7) is call
    table.add(call)
    assert table.to(None) == [call]


def test_waiting_until_there_is_no_call() -> None:
    table = CallTable()
    assert table.wait_empty(0)
    call = pending(table)
    table.add(call)
    assert not table.wait_empty(0.01)
    popping = threading.Timer(0.05, table.pop, (call.id,))
    popping.start()
    assert table.wait_empty(10)
    popping.join()
