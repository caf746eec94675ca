"""The queues of slow peers."""

from __future__ import annotations

from tensorplay.broker.outbound import CONTROL_BYTES, OVERHEAD, Outbound
from tensorplay.protocol import wire
from tensorplay.protocol.messages import Heartbeat, Kind, Roster, Route, Undeliverable

DATA = wire.encode(Route(Kind.REQUEST, 1, 2, 3))
CREDIT = wire.encode(Route(Kind.CREDIT, 1, 2, 0))
ROSTER = wire.encode(Roster())
REPORT = wire.encode(Undeliverable(1, 2, 3, "gone", ""))


def drain(outbound: Outbound, identity: bytes) -> list[object]:
    frames = []
    while (first := outbound.first(identity)) is not None:
        frames.append(first[0])
        outbound.pop(identity)
    return frames


def test_messages_keep_their_order_but_for_those_that_have_none() -> None:
    outbound = Outbound(10_000)
    for header in (DATA, ROSTER, CREDIT, DATA, REPORT):
        assert outbound.put(b"a", (header,), 10, data=header is not ROSTER)
    assert drain(outbound, b"a") == [CREDIT, REPORT, DATA, ROSTER, DATA]
    assert b"a" not in outbound
    assert len(outbound) == 0


def test_data_is_bounded_for_each_connection() -> None:
    outbound = Outbound(2 * (100 + OVERHEAD))
    assert outbound.put(b"a", (DATA,), 100, data=True)
    assert outbound.put(b"a", (DATA,), 100, data=True)
    assert not outbound.put(b"a", (DATA,), 0, data=True)
    assert outbound.put(b"a", (ROSTER,), 100, data=False)
    assert outbound.put(b"b", (DATA,), 100, data=True)
    assert outbound.queued_bytes(b"a") == 3 * (100 + OVERHEAD)
    outbound.pop(b"a")
    assert outbound.put(b"a", (DATA,), 100, data=True)


def test_one_message_may_always_wait() -> None:
    outbound = Outbound(10)
    assert outbound.put(b"a", (DATA,), 1000, data=True)
    assert not outbound.put(b"a", (DATA,), 0, data=True)


def test_the_brokers_own_messages_are_bounded_too() -> None:
    outbound = Outbound(10)
    header = wire.encode(Heartbeat(0.0))
    count = 0
    while outbound.put(b"a", (header,), len(header), data=False):
        count += 1
    assert count == CONTROL_BYTES // (len(header) + OVERHEAD)


def test_a_dropped_connection_leaves_nothing() -> None:
    outbound = Outbound(10_000)
    outbound.put(b"a", (DATA,), 10, data=True)
    assert outbound.waiting() == [b"a"]
    outbound.drop(b"a")
    outbound.drop(b"a")
    assert outbound.first(b"a") is None
    assert outbound.queued_bytes(b"a") == 0
    assert len(outbound) == 0
