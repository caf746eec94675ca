"""The broker's status, and what it warns of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tensorplay.broker.events import Tick
from tensorplay.broker.status import MAX_PAIRS, snapshot
from tensorplay.protocol.messages import Heartbeat, Kind, Role, Route
from tests.broker.test_state import Driver


def status(driver: Driver) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(snapshot(driver.state, driver.now, samples=True))
    return decoded


def beat(driver: Driver, seconds: float = 1.0) -> None:
    driver.now += seconds
    driver.settle(driver.handle(Tick()))


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.join("A", "worker0", 1, host="node1", pid=7, device="cuda:0")
    driver.join("C", "client", 3, role=Role.CLIENT)
    return driver


def test_a_peer_is_told_with_its_rates(driver: Driver) -> None:
    beat(driver)
    for number in range(10):
        driver.send("C", Route(Kind.REQUEST, 1, 3, number, 1000), size=1000)
    driver.send("C", Heartbeat(1.0, {"calls_made": 10, "call_p50": 0.01, "call_p99": 0.02}))
    beat(driver)
    told = status(driver)
    worker, client = told["namespaces"]["default"]["peers"]
    assert (worker["name"], worker["host"], worker["pid"]) == ("worker0", "node1", 7)
    assert worker["device"] == "cuda:0"
    assert worker["rates"]["bytes_sent"] == 10_000
    assert client["rates"]["bytes_received"] == 10_000
    assert client["rates"]["calls_made"] == 10
    assert client["stats"]["call_p99"] == 0.02
    assert told["namespaces"]["default"]["traffic"] == [
        {"from": "client", "to": "worker0", "messages": 10, "bytes": 10_000}
    ]
    assert told["samples"][-1]["calls"] == 10
    assert told["samples"][-1]["p99"] == 0.02


def test_what_happened_is_told(driver: Driver) -> None:
    driver.send("A", Heartbeat(1.0, errors=["a call of 'client' raised ValueError: no"]))
    driver.dead.add("A")
    beat(driver)
    beat(driver)
    told = status(driver)
    kinds = [(happening["kind"], happening["peer"]) for happening in told["happenings"]]
    assert kinds == [
        ("joined", "worker0"),
        ("joined", "client"),
        ("error", "worker0"),
        ("lost", "worker0"),
    ]
    assert "1 peer was lost in the last minute" in told["warnings"]


def test_an_error_does_not_wipe_the_stats(driver: Driver) -> None:
    driver.send("A", Heartbeat(1.0, {"modules": 2}))
    driver.send("A", Heartbeat(1.1, errors=["it\nraised"]))
    worker = status(driver)["namespaces"]["default"]["peers"][0]
    assert worker["stats"] == {"modules": 2}
    assert status(driver)["happenings"][-1]["text"] == "it raised"


def test_traffic_of_the_gone_is_forgotten(driver: Driver) -> None:
    for number in range(4, 40):
        driver.join("W", "worker1", number)
        driver.send("C", Route(Kind.REQUEST, number, 3, 1, 10), size=10)
        driver.dead.add("W")
        beat(driver)
        beat(driver)
        driver.dead.clear()
    client = driver.state.registry.namespaces["default"].by_name["client"]
    assert len(client.sent_to) < 5


def test_the_traffic_that_is_told_is_bounded() -> None:
    driver = Driver()
    for number in range(1, 30):
        driver.join(f"W{number}", f"worker{number}", number)
    for source in range(1, 30):
        for target in range(1, 30):
            route = Route(Kind.REQUEST, target, source, 1, source)
            driver.send(f"W{source}", route, size=source)
    pairs = status(driver)["namespaces"]["default"]["traffic"]
    assert len(pairs) == MAX_PAIRS
    assert pairs[0]["bytes"] == 29


def test_a_slow_loop_is_warned_of(driver: Driver) -> None:
    driver.state.health.turn(0.5)
    driver.state.health.sample(driver.now)
    told = status(driver)
    assert told["health"]["loop_latency"] == 0.5
    assert any("500 ms" in warning for warning in told["warnings"])


def test_an_incomplete_world_is_warned_of() -> None:
    driver = Driver()
    driver.join("A", "worker0", 1, rank=0, world_size=3)
    assert any("ranks 1, 2 are missing" in warning for warning in status(driver)["warnings"])


def test_peers_that_are_away_or_silent_are_warned_of(driver: Driver) -> None:
    driver.dead.add("A")
    beat(driver)
    assert any("peer 'worker0' is away" in warning for warning in status(driver)["warnings"])
    driver.now += 20
    assert any("peer 'client' is connected but silent" in w for w in status(driver)["warnings"])


def test_all_is_well(driver: Driver) -> None:
    assert status(driver)["warnings"] == []


def test_different_versions_are_warned_of() -> None:
    driver = Driver()
    versions = {**driver.state.versions, "tensorplay": "0.1.7"}
    driver.join("A", "worker0", 1, versions=versions)
    assert any("0.1.7" in warning for warning in status(driver)["warnings"])
