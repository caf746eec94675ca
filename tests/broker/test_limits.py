"""A connection that claims to be another one."""

from __future__ import annotations

import zmq

from tensorplay.protocol import wire
from tensorplay.protocol.messages import Kind, Refused, Route, Stranger
from tests.broker.helpers import Connect, hello


def test_a_second_connection_of_the_same_identity_takes_nothing(connect: Connect) -> None:
    """No peer of ours sets ZeroMQ's identity: the broker's own numbers tell connections apart."""
    victim = connect({zmq.IDENTITY: b"victim"})
    victim.register("victim", 1)
    thief = connect({zmq.IDENTITY: b"victim"})
    thief.send(hello("victim", 2))
    assert thief.receive(0.3) is None
    talker = connect()
    talker.register("talker", 3)
    talker.route(Kind.REQUEST, 1, 5, b"x")
    while True:
        message = wire.decode(victim.expect_frames()[0])
        if isinstance(message, Route):
            break
    assert message.id == 5
    assert thief.receive(0.1) is None


def test_a_claim_on_a_name_or_an_incarnation_is_refused(connect: Connect) -> None:
    connect().register("victim", 1)
    thief = connect()
    thief.send(hello("victim", 2))
    assert "is not unique" in thief.expect(Refused).text
    thief.send(hello("thief", 1))
    assert "is registered as 'victim'" in thief.expect(Refused).text


def test_who_is_not_registered_can_send_nobody_anything(connect: Connect) -> None:
    victim = connect()
    victim.register("victim", 1)
    thief = connect()
    thief.send(wire.encode(Route(Kind.REQUEST, 1, 1, 5, 3)), b"abc")
    thief.expect(Stranger)
    victim.expect_nothing()
