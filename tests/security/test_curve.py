"""Attacks on a broker that asks for keys, and what its peers are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tensorplay import keys
from tensorplay.broker import Broker
from tensorplay.protocol.messages import (
    Answer,
    Ask,
    Kind,
    Refused,
    Roster,
    Stranger,
    Undeliverable,
    Welcome,
)
from tests.broker.helpers import PATIENCE, RawPeer, hello
from tests.security.helpers import INTERVAL, KeyRing, dial


class Dialer:
    """Connects raw peers that are closed at the end."""

    def __init__(self, stack: ExitStack, context: zmq.Context[Any], broker: Broker) -> None:
        self._stack = stack
        self._context = context
        self._broker = broker

    def __call__(self, own: keys.PeerKeys | None) -> RawPeer:
        return self._stack.enter_context(dial(self._context, self._broker.address, own))


@pytest.fixture
def connect(context: zmq.Context[Any], broker: Broker) -> Iterator[Dialer]:
    with ExitStack() as stack:
        yield Dialer(stack, context, broker)


def failure_of_handshake(peer: RawPeer) -> int:
    """Returns the event with which a handshake failed."""
    failures = (
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    monitor = peer.socket.get_monitor_socket(failures | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        assert monitor.poll(int(PATIENCE * 1000)), "the handshake did not end"
        event = recv_monitor_message(monitor)["event"]
        assert event & failures, "the handshake succeeded"
        return int(event)
    finally:
        peer.socket.disable_monitor()
        monitor.close(linger=0)


def test_who_is_allowed_registers(ring: KeyRing, connect: Dialer) -> None:
    peer = connect(ring.make("alice"))
    welcome = peer.register("alice", 1)
    assert (welcome.peer.name, welcome.peer.calls, welcome.peer.serves) == ("alice", True, True)


def test_an_unknown_key_is_refused_in_the_handshake(
    ring: KeyRing, connect: Dialer, caplog: pytest.LogCaptureFixture
) -> None:
    mallory = ring.make_unknown("mallory")
    peer = connect(mallory)
    assert failure_of_handshake(peer) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert f"the public key {mallory.own.public} is not allowed" in caplog.text
    assert mallory.own.secret.decode() not in caplog.text


def test_who_shows_no_key_is_refused_in_the_handshake(connect: Dialer) -> None:
    failure_of_handshake(connect(None))


def test_a_public_key_without_its_secret_is_refused(ring: KeyRing, connect: Dialer) -> None:
    alice, mallory = ring.make("alice"), ring.make_unknown("mallory")
    forged = keys.PeerKeys(alice.server, keys.KeyPair(alice.own.public, mallory.own.secret))
    failure_of_handshake(connect(forged))


def test_a_broker_with_another_key_is_not_spoken_to(ring: KeyRing, connect: Dialer) -> None:
    alice, other = ring.make("alice"), ring.make_unknown("other")
    failure_of_handshake(connect(keys.PeerKeys(other.own.public, alice.own)))


@pytest.mark.parametrize("name", ["bob", "alice2", "Alice"])
def test_a_right_key_with_a_wrong_name_is_refused(
    ring: KeyRing, connect: Dialer, name: str
) -> None:
    peer = connect(ring.make("alice"))
    peer.send(hello(name, 1))
    refused = peer.expect(Refused)
    assert refused.code == "key"
    assert (
        f"key 'alice' may register the names alice in the namespaces default, but not {name!r}"[:60]
        in refused.text
    )


def test_a_right_key_with_a_wrong_namespace_is_refused(ring: KeyRing, connect: Dialer) -> None:
    peer = connect(ring.make("alice"))
    peer.send(hello("alice", 1, namespace="prod"))
    assert "but not 'alice' in 'prod'" in peer.expect(Refused).text


def test_a_replayed_registration_is_refused(ring: KeyRing, connect: Dialer) -> None:
    """The same HELLO, bit for bit, by somebody with another key that may use the name."""
    alice, mallory = ring.make("alice"), ring.make("mallory", names=["*"])
    owner = connect(alice)
    owner.register("alice", 77)
    thief = connect(mallory)
    thief.send(hello("alice", 77))
    assert thief.expect(Refused).code == "invalid"
    owner.send(hello("alice", 77))  # the owner may repeat it
    assert owner.expect(Welcome).peer.incarnation == 77


def test_a_sender_cannot_be_forged(ring: KeyRing, connect: Dialer) -> None:
    receiver, victim, liar = (connect(ring.make(name)) for name in ("bob", "alice", "mallory"))
    receiver.register("bob", 1)
    victim.register("alice", 2)
    receiver.expect(Roster)
    liar.register("mallory", 3)
    receiver.expect(Roster)
    liar.route(Kind.REQUEST, 1, 9, b"payload", src=2)
    assert "claimed to be from 2" in liar.expect(Undeliverable).text
    receiver.expect_nothing()
    assert receiver.status()["counters"]["forged"] == 1


def test_a_message_to_another_namespace_reaches_nobody(ring: KeyRing, connect: Dialer) -> None:
    here = connect(ring.make("alice"))
    there = connect(ring.make("bob", namespaces=["prod"]))
    here.register("alice", 1)
    there.register("bob", 2, namespace="prod")
    here.route(Kind.REQUEST, 2, 9, b"payload")
    assert here.expect(Undeliverable).code == "gone"
    there.expect_nothing()


def test_status_shows_only_the_namespaces_of_the_key(ring: KeyRing, connect: Dialer) -> None:
    here = connect(ring.make("alice"))
    there = connect(ring.make("bob", namespaces=["prod"]))
    here.register("alice", 1)
    there.register("bob", 2, namespace="prod")
    assert list(here.status()["namespaces"]) == ["default"]
    assert list(there.status()["namespaces"]) == ["prod"]
    owner = connect(keys.peer_keys(ring.directory, keys.BROKER_NAME))
    assert set(owner.status()["namespaces"]) == {"default", "prod"}


@pytest.mark.parametrize("what", ["drain", "kill", "logs"])
def test_who_may_only_call_a_worker_does_not_own_it(
    ring: KeyRing, connect: Dialer, what: str
) -> None:
    worker = connect(ring.make("worker0", role=keys.KeyRole.SERVE))
    worker.register("worker0", 1)
    caller = connect(ring.make("trainer", role=keys.KeyRole.CALL))
    caller.send(Ask(7, what, "worker0"))
    answer = caller.expect(Answer)
    assert answer.error.startswith(f"{what} 'worker0' needs a key that may register that name")
    worker.expect_nothing()
    elsewhere = connect(ring.make("other", names=["*"], namespaces=["prod"]))
    elsewhere.send(Ask(7, what, "worker0"))
    assert "peers in namespace 'default'" in elsewhere.expect(Answer).error
    operator = connect(ring.make("operator", names=["*"], role=keys.KeyRole.CALL))
    operator.send(Ask(7, what, "worker0"))
    assert worker.expect(Ask).what == what


def test_a_chosen_identity_gives_nothing(ring: KeyRing, connect: Dialer) -> None:
    """The key of each message counts, not the name that ZeroMQ gave its connection."""
    alice, mallory = ring.make("alice"), ring.make("mallory")
    owner = connect(alice)
    owner.socket.setsockopt(zmq.IDENTITY, b"chosen")
    owner.register("alice", 1)
    owner.socket.close()
    thief = connect(mallory)
    thief.socket.setsockopt(zmq.IDENTITY, b"chosen")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        thief.route(Kind.REQUEST, 1, 9, src=1)
        frames = thief.receive(0.2)
        if frames is not None:
            break
    thief.send(hello("alice", 1))
    assert thief.expect(Refused).code == "key"


def test_a_revoked_peer_is_cut_off_within_a_heartbeat(ring: KeyRing, connect: Dialer) -> None:
    alice, bob = connect(ring.make("alice")), connect(ring.make("bob"))
    alice.register("alice", 1)
    bob.register("bob", 2)
    alice.expect(Roster)
    keys.revoke(ring.directory, "bob")
    revoked_at = time.monotonic()
    refused = bob.expect(Refused)
    assert time.monotonic() - revoked_at < INTERVAL + 1.0
    assert (refused.code, "its key was revoked" in refused.text) == ("key", True)
    (left,) = alice.expect(Roster).left
    assert (left.peer.name, left.clean) == ("bob", False)
    # Its connection stands still, but it is nobody.
    bob.route(Kind.REQUEST, 1, 9, b"payload")
    bob.expect(Stranger)
    bob.send(hello("bob", 3))
    assert bob.expect(Refused).code == "key"
    alice.expect_nothing()


def test_a_revoked_key_is_refused_in_the_handshake(ring: KeyRing, connect: Dialer) -> None:
    own = ring.make("bob")
    connect(own).register("bob", 2)
    keys.revoke(ring.directory, "bob")
    assert failure_of_handshake(connect(own)) == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def test_a_key_that_is_allowed_while_the_broker_runs_is_let_in(
    ring: KeyRing, connect: Dialer
) -> None:
    own = ring.make_unknown("late")
    failure_of_handshake(connect(own))
    keys.allow(ring.directory, "late")
    assert connect(own).register("late", 1).peer.name == "late"


def test_a_narrowed_permission_takes_effect(ring: KeyRing, connect: Dialer) -> None:
    peer = connect(ring.make("alice"))
    peer.register("alice", 1)
    keys.allow(ring.directory, "alice", role=keys.KeyRole.CALL)
    assert "does not allow any more what it did" in peer.expect(Refused).text
    welcome = peer.register("alice", 2)
    assert (welcome.peer.calls, welcome.peer.serves) == (True, False)


def test_no_secret_is_logged_or_shown(
    ring: KeyRing, connect: Dialer, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    own = ring.make("alice")
    peer = connect(own)
    peer.register("alice", 1)
    failure_of_handshake(connect(ring.make_unknown("mallory")))
    shown = f"{peer.status()} {broker.config!r} {own!r} {caplog.text} {vars(broker)!r}"
    for path in ring.directory.glob("*.key_secret"):
        assert keys.load_pair(path).secret.decode() not in shown
