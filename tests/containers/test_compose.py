"""``docker/compose.yaml`` runs, by podman-compose."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.containers.engine import ROOT, Engine
from tests.following import PATIENCE

Compose = Callable[..., "subprocess.CompletedProcess[str]"]
#: The names that the file gives its images.
NAMES = {"broker": "localhost/tensorplay-broker", "worker": "localhost/tensorplay-worker"}


@pytest.fixture
def compose(engine: Engine, images: dict[str, str]) -> Iterator[Compose]:
    """Runs podman-compose; what it has started is gone at the end."""
    if shutil.which("podman-compose") is None:
        pytest.skip("podman-compose is not installed")
    for what, name in NAMES.items():
        engine.run("tag", images[what], name)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman-compose", "-f", "docker/compose.yaml", *arguments],
            cwd=ROOT,
            env=engine.environment,
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


def test_the_composed_cluster_trains(compose: Compose, engine: Engine) -> None:
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
