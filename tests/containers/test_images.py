"""What the images are, and how their containers start and end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers.engine import Cluster, Engine
from tests.following import PATIENCE

StartCluster = Callable[..., Cluster]

HERE = Path(__file__).parent
#: Most that the broker's image may add to its base, in bytes.
BROKER_BYTES = 150e6


def test_the_broker_adds_little_to_its_base(engine: Engine, images: dict[str, str]) -> None:
    added = engine.inspect(images["broker"])["Size"] - engine.inspect(engine.base())["Size"]
    print(f"the broker adds {added / 1e6:.0f} MB to its base")
    assert 0 < added < BROKER_BYTES


@pytest.mark.parametrize("what", ["broker", "worker"])
def test_an_image_says_what_it_is(engine: Engine, images: dict[str, str], what: str) -> None:
    config = engine.inspect(images[what])["Config"]
    assert config["Labels"]["org.opencontainers.image.title"] == f"tensorplay {what}"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"


@pytest.mark.parametrize("what", ["broker", "worker"])
def test_no_secret_of_the_build_is_left(engine: Engine, images: dict[str, str], what: str) -> None:
    found = engine.attempt(
        *("run", "--rm", "--network=none", "--entrypoint=cat", images[what], "/etc/pip.conf")
    )
    assert found.stdout == ""


def test_the_broker_has_no_torch(engine: Engine, images: dict[str, str]) -> None:
    code = "import importlib.util as u; print(*map(u.find_spec, ('torch', 'numpy', 'cloudpickle')))"
    printed = engine.run(
        *("run", "--rm", "--network=none", "--entrypoint=python", images["broker"], "-c", code)
    )
    assert printed.split() == ["None"] * 3


def test_the_same_sources_give_the_same_layers(engine: Engine) -> None:
    layers = []
    for number in range(2):
        tag = f"localhost/tensorplay-test-again{number}"
        engine.build("broker", tag, "--no-cache", "--timestamp", "0")
        layers.append(engine.inspect(tag)["RootFS"]["Layers"])
        engine.run("rmi", tag)
    assert layers[0] == layers[1]


def test_the_broker_refuses_a_network_that_it_was_not_told_to_trust(
    engine: Engine, images: dict[str, str]
) -> None:
    done = engine.attempt("run", "--rm", "--network=none", images["broker"])
    assert done.returncode == 2
    assert "can be reached from other hosts" in done.stderr


def test_the_health_check_tells_a_broker_that_hangs(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.broker()  # waits until it is well
    name = cluster.full("broker")
    cluster.engine.run("pause", name)
    cluster.engine.run("unpause", name)
    assert cluster.engine.attempt("healthcheck", "run", name).returncode == 0
    cluster.engine.run("kill", "--signal", "STOP", name)
    assert cluster.engine.attempt("healthcheck", "run", name).returncode != 0
    cluster.engine.run("kill", "--signal", "CONT", name)
    assert cluster.engine.attempt("healthcheck", "run", name).returncode == 0


def test_all_end_when_they_are_told(start_cluster: StartCluster) -> None:
    """The worker finishes its call first, and its caller gets the result."""
    cluster = start_cluster()
    cluster.broker()
    cluster.worker("worker0")
    script = cluster.run_python("client", HERE / "long_call.py", "tcp://broker:5555", "worker0")
    script.expect("under way")
    cluster.engine.run("stop", "--time", "30", cluster.full("worker0"), timeout=PATIENCE)
    script.expect("done")
    assert script.end() == 0
    cluster.engine.run("stop", "--time", "30", cluster.full("broker"), timeout=PATIENCE)
    for name in ("worker0", "broker"):
        state = cluster.engine.inspect(cluster.full(name))["State"]
        assert (state["Status"], state["ExitCode"]) == ("exited", 0), json.dumps(state)
