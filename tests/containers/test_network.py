"""Broker, workers and training code in containers of their own, on a private network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers.engine import Cluster
from tests.following import PATIENCE

StartCluster = Callable[..., Cluster]

HERE = Path(__file__).parent


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_training_goes_on_when_a_worker_dies_and_the_broker_restarts(
    start_cluster: StartCluster, in_the_middle: bool
) -> None:
    cluster = start_cluster("--internal")
    cluster.worker("worker0")  # comes before the broker, and waits for it
    # podman's name server may not answer for half a minute while a container restarts.
    cluster.broker("--env=TENSORPLAY_HEARTBEAT_TIMEOUT=30")
    cluster.worker("worker1")
    options = ["--in-the-middle"] if in_the_middle else []
    trainer = cluster.run_python("trainer", HERE / "trainer.py", "tcp://broker:5555", *options)

    trainer.expect("trained: kill worker0")
    cluster.engine.run("kill", "--signal", "KILL", cluster.full("worker0"))
    error = trainer.expect("WorkerLostError")
    assert "worker0" in error
    cluster.engine.run("start", cluster.full("worker0"))

    trainer.expect("trained again: restart the broker")
    cluster.engine.run("restart", "--time", "5", cluster.full("broker"))
    cluster.wait_well()
    trainer.send("it is restarted")
    trainer.expect("trained to the end", 3 * PATIENCE)
    assert trainer.end() == 0
    assert cluster.logs("broker").count("tensorplay broker ready") == 2


def by_name(cluster: Cluster) -> str:
    return "tcp://broker:5555"


def by_address(cluster: Cluster) -> str:
    return f"tcp://{cluster.address('broker')}:5555"


def by_ipv6_address(cluster: Cluster) -> str:
    return f"tcp://[{cluster.address('broker', version=6)}]:5555"


@pytest.mark.parametrize("way", [by_name, by_address, by_ipv6_address])
def test_the_broker_is_found(start_cluster: StartCluster, way: Callable[[Cluster], str]) -> None:
    cluster = start_cluster("--ipv6")
    cluster.broker("--env=TENSORPLAY_BIND=tcp://[::]:5555")
    address = way(cluster)
    cluster.worker("worker0", broker=address)
    script = cluster.run_python("client", HERE / "caller.py", address, "worker0")
    assert script.end() == 0, script.output


def test_no_process_needs_to_find_itself(start_cluster: StartCluster) -> None:
    """Own host names that nobody resolves, and one kernel that all of them share."""
    cluster = start_cluster()
    cluster.broker("--no-hosts")
    address = by_address(cluster)
    cluster.worker("worker0", "--no-hosts", "--dns=127.0.0.1", broker=address)
    script = cluster.run_python(
        "client", HERE / "caller.py", address, "worker0", options=["--no-hosts", "--dns=127.0.0.1"]
    )
    assert script.end() == 0, script.output


def test_an_address_that_nobody_has_is_named(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.broker()
    script = cluster.run_python("client", HERE / "caller.py", "tcp://brokre:5555", "worker0")
    assert script.end() == 1
    assert "no answer from a broker at tcp://brokre:5555" in script.output
