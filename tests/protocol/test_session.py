"""The peer's registration, driven without clock or socket."""

from __future__ import annotations

import pytest

from tensorplay.protocol.messages import (
    PROTOCOL_VERSION,
    Answer,
    Ask,
    Departure,
    Farewell,
    Goodbye,
    Heartbeat,
    Hello,
    PeerInfo,
    Refused,
    Role,
    Roster,
    Stranger,
    Undeliverable,
    Welcome,
)
from tensorplay.protocol.session import (
    HELLO_INTERVAL,
    MAX_HELLO_INTERVAL,
    Answered,
    Asked,
    BrokerLost,
    Closed,
    NotDelivered,
    PeersChanged,
    PeerSession,
    Registered,
    Rejected,
    Send,
    State,
)

ME = PeerInfo("me", 3, 11, Role.WORKER)
OTHER = PeerInfo("other", 0, 22, Role.WORKER)
HELLO = Hello(PROTOCOL_VERSION, "me", "default", 11, Role.WORKER)


def welcome(*peers: PeerInfo, broker: int = 1) -> Welcome:
    return Welcome(PROTOCOL_VERSION, broker, ME, [ME, *peers], 1.0, 5.0, 1 << 40)


@pytest.fixture
def session() -> PeerSession:
    """A session that the broker has welcomed at time 0, with one other peer there."""
    session = PeerSession(HELLO)
    assert session.start(0.0) == [Send(HELLO)]
    commands = session.receive(welcome(OTHER), 0.0)
    assert commands == [
        Registered(welcome(OTHER), again=False),
        PeersChanged(joined=(ME, OTHER)),
    ]
    return session


def test_hello_is_repeated_until_the_broker_answers() -> None:
    session = PeerSession(HELLO)
    session.start(0.0)
    assert session.tick(HELLO_INTERVAL / 2) == []
    assert session.tick(HELLO_INTERVAL) == [Send(HELLO)]
    assert session.next_tick() == 3 * HELLO_INTERVAL
    now = 0.0
    for _ in range(20):
        now = session.next_tick()
        session.tick(now)
    assert session.next_tick() == now + MAX_HELLO_INTERVAL


def test_refusal_closes_the_session() -> None:
    session = PeerSession(HELLO)
    session.start(0.0)
    refused = Refused(PROTOCOL_VERSION, "name-taken", "name 'me' is not unique")
    assert session.receive(refused, 0.1) == [Rejected(refused)]
    assert session.state is State.CLOSED
    assert session.receive(welcome(), 0.2) == []


def test_a_welcome_for_another_incarnation_is_ignored() -> None:
    session = PeerSession(Hello(PROTOCOL_VERSION, "me", "default", 99, Role.WORKER))
    session.start(0.0)
    assert session.receive(welcome(), 0.0) == []
    assert session.state is State.REGISTERING


def test_heartbeats_carry_the_stats(session: PeerSession) -> None:
    assert session.tick(0.5, lambda: {"calls": 1}) == []
    assert session.tick(1.0, lambda: {"calls": 1}) == [Send(Heartbeat(1.0, {"calls": 1}))]


def test_questions_and_answers_are_handed_on(session: PeerSession) -> None:
    ask, answer = Ask(3, "ping"), Answer(4, b'{"time":1}')
    assert session.receive(ask, 0.5) == [Asked(ask)]
    assert session.receive(answer, 0.5) == [Answered(answer)]


def test_silence_is_reported_once_and_ends_with_a_sign_of_life(session: PeerSession) -> None:
    lost = [command for command in session.tick(5.5) if isinstance(command, BrokerLost)]
    assert lost == [BrokerLost(5.5)]
    assert not any(isinstance(command, BrokerLost) for command in session.tick(6.5))
    session.heard(7.0)
    assert not any(isinstance(command, BrokerLost) for command in session.tick(11.5))
    assert any(isinstance(command, BrokerLost) for command in session.tick(12.6))


def test_roster_changes_are_told_once(session: PeerSession) -> None:
    third = PeerInfo("third", 1, 33)
    assert session.receive(Roster(joined=[third]), 1.0) == [PeersChanged(joined=(third,))]
    assert session.receive(Roster(joined=[third]), 1.0) == [PeersChanged(back=(third,))]
    gone = Departure(third, clean=True, reason="left")
    assert session.receive(Roster(left=[gone]), 2.0) == [PeersChanged(left=(gone,))]
    assert session.receive(Roster(left=[gone]), 2.0) == []


def test_a_stranger_registers_again_with_the_id_it_had(session: PeerSession) -> None:
    [command] = session.receive(Stranger(), 10.0)
    assert isinstance(command, Send)
    hello = command.message
    assert isinstance(hello, Hello)
    assert (hello.name, hello.incarnation, hello.rank) == ("me", 11, 3)
    commands = session.receive(welcome(OTHER), 10.1)
    assert commands[0] == Registered(welcome(OTHER), again=True)
    assert session.state is State.REGISTERED


def test_peers_missing_after_a_reconnect_to_the_same_broker_are_gone(session: PeerSession) -> None:
    session.receive(Stranger(), 10.0)
    changed = session.receive(welcome(), 10.1)[1]
    assert isinstance(changed, PeersChanged)
    assert [gone.peer for gone in changed.left] == [OTHER]


def test_peers_missing_after_a_restart_have_time_to_come_back(session: PeerSession) -> None:
    session.receive(Stranger(), 10.0)
    assert session.receive(welcome(broker=2), 10.0)[1] == PeersChanged()
    assert session.receive(Roster(joined=[OTHER]), 12.0) == [PeersChanged(back=(OTHER,))]
    assert not any(isinstance(command, PeersChanged) for command in session.tick(30.0))


def test_peers_that_do_not_come_back_after_a_restart_are_lost(session: PeerSession) -> None:
    session.receive(Stranger(), 10.0)
    session.receive(welcome(broker=2), 10.0)
    assert not any(isinstance(command, PeersChanged) for command in session.tick(19.9))
    [changed] = [c for c in session.tick(20.0) if isinstance(c, PeersChanged)]
    assert [gone.peer for gone in changed.left] == [OTHER]


def test_registering_again_does_not_end_that_time(session: PeerSession) -> None:
    session.receive(Stranger(), 10.0)
    session.receive(welcome(broker=2), 10.0)
    session.connected(11.0)
    assert session.receive(welcome(broker=2), 11.0)[1] == PeersChanged()
    [changed] = [c for c in session.tick(20.0) if isinstance(c, PeersChanged)]
    assert [gone.peer for gone in changed.left] == [OTHER]


def test_leaving_waits_for_the_farewell(session: PeerSession) -> None:
    assert session.leave() == [Send(Goodbye("left"))]
    assert session.receive(Farewell(), 1.0) == [Closed()]
    assert session.state is State.CLOSED


def test_leaving_a_broker_that_does_not_know_us_is_over_at_once(session: PeerSession) -> None:
    session.leave()
    assert session.receive(Stranger(), 1.0) == [Closed()]


def test_leaving_before_starting_is_over_at_once() -> None:
    assert PeerSession(HELLO).leave() == [Closed()]


def test_undeliverable_messages_are_passed_on(session: PeerSession) -> None:
    report = Undeliverable(32, 22, 7, "gone", "no such peer")
    assert session.receive(report, 1.0) == [NotDelivered(report)]
