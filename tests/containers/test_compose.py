"""``docker/compose.yaml`` runs, by podman-compose."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tests.containers.engine import ROOT, Engine
from tests.following import PATIENCE

Compose = Callable[..., "subprocess.CompletedProcess[str]"]
#: The names that the file gives its images.
NAMES = {"broker": "localhost/tensorplay-broker", "worker": "localhost/tensorplay-worker"}


@pytest.fixture
def compose(engine: Engine, images: dict[str, str], free_port: int) -> Iterator[Compose]:
    """Runs podman-compose; what it has started is gone at the end."""
    if shutil.which("podman-compose") is None:
        pytest.skip("podman-compose is not installed")
    for what, name in NAMES.items():
        engine.run("tag", images[what], name)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman-compose", "-f", "docker/compose.yaml", *arguments],
            cwd=ROOT,
            env=engine.environment | {"TENSORPLAY_HTTP_PORT": str(free_port)},
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE,
        )

    yield run
    run("down", "--volumes")
    for what, name in NAMES.items():
        engine.run("untag", images[what], name)


def logs(engine: Engine, container: str) -> str:
    done = engine.attempt("logs", container)
    return done.stdout + done.stderr


def metrics(port: int, token: str) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
    return text


def test_the_composed_cluster_trains(compose: Compose, engine: Engine, free_port: int) -> None:
    started = compose("up", "--no-build", "--detach")
    assert started.returncode == 0, started.stderr
    (trainer,) = engine.run("ps", "--all", "--quiet", "--filter", "name=trainer").split()
    # podman-compose does not wait for the keys: what comes before them is started again.
    deadline = time.monotonic() + 3 * PATIENCE
    while "Loss curves" not in (said := logs(engine, trainer)):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    assert "Largest difference from the losses of one process: 0.0e+00" in said
    (broker,) = engine.run("ps", "--quiet", "--filter", "name=broker").split()
    assert engine.attempt("healthcheck", "run", broker).returncode == 0
    assert "insecure" not in logs(engine, broker)
    token = engine.run("exec", broker, "cat", "/keys/broker/http_token").strip()
    assert 'tensorplay_peer_up{namespace="default",peer="worker0"}' in metrics(free_port, token)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        metrics(free_port, "guessed")
