"""The messages: layout on the wire, defaults, immutability."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from tensorplay.protocol import messages, wire
from tensorplay.protocol.messages import (
    FIRST_ROUTED_KIND,
    PROTOCOL_VERSION,
    Answer,
    Ask,
    Control,
    Departure,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    Kind,
    PeerInfo,
    Refused,
    Role,
    Roster,
    Route,
    Status,
    StatusRequest,
    Stranger,
    Undeliverable,
    Welcome,
)

PEER = PeerInfo("w", 0, 1 << 62, Role.WORKER, "host", 5, "cuda:0", {"torch": "2.13.0"})
EXAMPLES: list[Any] = [
    Hello(PROTOCOL_VERSION, "w", "n", 1 << 62, Role.CLIENT, 3, 4, "host", 5, "cpu", {"a": "b"}),
    Welcome(PROTOCOL_VERSION, 7, PEER, [PEER], 1.0, 5.0, 1 << 40, {"a": "b"}, ["warning"]),
    Refused(PROTOCOL_VERSION, "name-taken", "text"),
    Roster([PEER], [Departure(PEER, False, "silent")], ["text"]),
    Heartbeat(1.5, {"calls": 2.0}, ["f of 'c' raised ValueError"]),
    Goodbye("done"),
    Farewell(),
    Stranger("restarted"),
    Undeliverable(32, 1, 2, "gone", "text"),
    StatusRequest(),
    Status(b"{}"),
    Ask(3, "logs", "w", "n", b'{"since":0}'),
    Answer(3, b"{}", "no peer"),
    Route(Kind.REQUEST, 1 << 62, (1 << 63) - 1, 1 << 40, 1 << 50),
]


def test_every_control_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == {*get_args(Control), Route}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: Any) -> None:
    header = wire.encode(message)
    assert wire.decode(header) == message
    assert wire.decode(memoryview(header)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_the_kind_is_the_second_byte(message: Any) -> None:
    header = wire.encode(message)
    assert header[0] >> 4 == 0x9  # an array of at most 15 elements
    kind = Kind(header[1])
    assert isinstance(message, Route) == (kind >= FIRST_ROUTED_KIND)
    assert kind.name.replace("_", "").lower() == (
        "request" if isinstance(message, Route) else type(message).__name__.lower()
    )


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_newer_peer_may_add_elements(message: Any) -> None:
    fields = msgspec.msgpack.decode(wire.encode(message))
    assert wire.decode(msgspec.msgpack.encode([*fields, "new"])) == message


def test_an_older_peer_may_leave_trailing_elements_out() -> None:
    header = msgspec.msgpack.encode([int(Kind.HELLO), 1, "w", "n", 5, int(Role.WORKER)])
    assert wire.decode(header) == Hello(1, "w", "n", 5, Role.WORKER)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_are_immutable(message: Any) -> None:
    for name in message.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(message, name, None)


def test_default_containers_are_not_shared() -> None:
    assert Roster().joined is not Roster().joined
    assert Heartbeat(0.0).stats is not Heartbeat(0.0).stats


def test_control_kinds_come_before_routed_ones() -> None:
    control = {kind for kind in Kind if kind < FIRST_ROUTED_KIND}
    assert len(control) == len(get_args(Control))
    assert max(Kind) < 128  # one byte in MessagePack
    assert messages.FIRST_RANKLESS_ID < -1
