"""Operators' questions: passed on, answered, and what becomes of those that cannot be."""

from __future__ import annotations

import re

import msgspec
import pytest

from tensorplay.broker.events import Tick
from tensorplay.broker.operators import MAX_WAITING
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    Answer,
    Ask,
    Departure,
    Heartbeat,
    Role,
    Roster,
    Stranger,
)
from tests.broker.test_state import Driver


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.join("A", "worker0", 1)
    driver.join("C", "client", 3, role=Role.CLIENT)
    return driver


def test_the_broker_tells_the_time_to_anybody(driver: Driver) -> None:
    (answer,) = driver.send("X", Ask(5, "time")).to("X")
    assert isinstance(answer, Answer)
    assert answer.id == 5
    assert msgspec.json.decode(answer.json) == {"time": driver.now}


def test_a_question_goes_to_the_peer_and_its_answer_back(driver: Driver) -> None:
    (asked,) = driver.send("X", Ask(5, "logs", "worker0", json=b'{"since":3}')).to("A")
    assert isinstance(asked, Ask)
    assert (asked.what, asked.json) == ("logs", b'{"since":3}')
    sent = driver.send("A", Answer(asked.id, b'{"lines":[]}'))
    assert sent == [("X", Answer(5, b'{"lines":[]}'))]
    assert driver.send("A", Answer(asked.id, b"{}")) == [], "a second answer goes nowhere"


def test_only_who_was_asked_may_answer(driver: Driver) -> None:
    (asked,) = driver.send("X", Ask(5, "ping", "worker0")).to("A")
    assert isinstance(asked, Ask)
    assert driver.send("C", Answer(asked.id, b"{}")) == []
    assert driver.send("A", Answer(asked.id, b"{}")) == [("X", Answer(5, b"{}"))]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (Ask(5, "nonsense"), "'nonsense'"),
        (Ask(5, "ping", "worker9"), "no peer 'worker9' .*client, worker0 are"),
        (Ask(5, "ping", "worker0", "other"), "namespace 'default'"),
        (Ask(5, "drain", "client"), "only workers"),
    ],
)
def test_what_cannot_be_asked_is_an_error(driver: Driver, ask: Ask, told: str) -> None:
    (answer,) = driver.send("X", ask).to("X")
    assert isinstance(answer, Answer)
    assert re.search(told, answer.error)


def test_who_waits_for_a_peer_that_goes_is_told(driver: Driver) -> None:
    driver.send("X", Ask(5, "ping", "worker0"))
    driver.dead.add("A")
    driver.now += driver.state.config.heartbeat_interval
    driver.settle(driver.handle(Tick()))
    driver.now += driver.state.config.reconnect_grace
    (answer,) = driver.settle(driver.handle(Tick())).to("X")
    assert isinstance(answer, Answer)
    assert "'worker0' is gone" in answer.error


def test_a_killed_peer_is_lost_at_once(driver: Driver) -> None:
    sent = driver.send("X", Ask(5, "kill", "worker0"))
    assert [type(message) for message in sent.to("A")] == [Ask]
    assert sent.to("X") == [Answer(5)]
    (roster,) = sent.to("C")
    assert isinstance(roster, Roster)
    (gone,) = roster.left
    assert isinstance(gone, Departure)
    assert not gone.clean
    assert gone.reason == "killed by an operator"
    assert [type(message) for message in driver.send("A", Heartbeat(1.0)).to("A")] == [Stranger]


def test_questions_that_wait_are_bounded(driver: Driver) -> None:
    for number in range(MAX_WAITING + 10):
        driver.send("X", Ask(number, "ping", "worker0"))
    assert len(driver.state.operators) == MAX_WAITING


def test_a_question_fits_the_wire() -> None:
    assert wire.decode(wire.encode(Ask(1, "ping", "w"))) == Ask(1, "ping", "w")
