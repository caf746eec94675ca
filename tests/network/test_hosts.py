"""Broker, workers and training code on four hosts, made of network namespaces."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.following import Follower
from tests.network.hosts import ROOT, Hosts, reason_to_skip

WORKERS = ("worker0", "worker1")

_reason = reason_to_skip()
pytestmark = pytest.mark.skipif(_reason is not None, reason=_reason or "")


class World:
    """Everything runs, each part on its own host."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.address = f"tcp://{hosts.address('broker')}:5555"
        self.broker = hosts.start(
            *("broker", "-m", "tensorplay.broker", "--insecure", "--bind", self.address)
        )
        self.broker.expect("ready")
        for name in WORKERS:
            hosts.start(name, "-m", "tensorplay.worker", "--broker", self.address, "--name", name)
        self.client: Follower = hosts.start("client", "-m", "tests.network.client", self.address)
        self.client.expect("ready")

    def ask(self, command: str) -> str:
        """Has the client do something and returns what it says."""
        self.client.send(command)
        return self.client.expect(f"{command}: ")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with Hosts(["broker", *WORKERS, "client"]) as hosts:
        yield World(hosts)


def test_training_across_hosts(world: World) -> None:
    assert world.ask("train") == "train: loss falls: True\n"


def test_only_the_broker_listens(world: World) -> None:
    assert world.hosts.listeners("broker") == [f"{world.hosts.address('broker')}:5555"]
    for name in (*WORKERS, "client"):
        assert world.hosts.listeners(name) == []


def test_an_example_runs_across_hosts(world: World) -> None:
    address = f"{world.address}/example"
    for host, name in zip(WORKERS, ("server", "trainer0"), strict=True):
        world.hosts.start(host, "-m", "tensorplay.worker", "--broker", address, "--name", name)
    script = str(ROOT / "examples" / "parameter_server.py")
    options = ("--broker", address, "--trainers", "1", "--steps", "2")
    example = world.hosts.start("client", script, *options)
    assert example.end() == 0, example.output
    assert "loss at first" in example.output


@pytest.mark.parametrize("cut_off", ["worker0", "client", "broker"])
def test_calls_survive_a_link_that_comes_back(world: World, cut_off: str) -> None:
    world.client.send("call_through")
    world.client.expect("under way")
    world.hosts.unplug(cut_off)
    time.sleep(3.0)
    world.hosts.plug(cut_off)
    assert world.client.expect("call_through: ") == "call_through: 1 True\n"


def test_a_link_that_stays_down_is_an_error_and_its_worker_comes_back(world: World) -> None:
    world.client.send("call_lost")
    world.client.expect("under way")
    world.hosts.unplug("worker0")
    told = world.client.expect("call_lost: ")
    assert "WorkerLostError" in told
    assert "'worker0'" in told
    world.hosts.plug("worker0")
    assert world.ask("rejoin") == "rejoin: sum 2.0\n"
