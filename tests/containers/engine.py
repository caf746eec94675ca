"""podman as the tests use it: images, networks and containers that are gone at the end.

Where no systemd runs, podman is told to do without it.  Images are built from the base image
that ``TENSORPLAY_TEST_BASE`` names; else one is made by debootstrap, once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.following import PATIENCE, Follower

ROOT = Path(__file__).parents[2]
#: Made by debootstrap, and kept for the next run.
OWN_BASE = "localhost/tensorplay-test-base"
#: Seconds that a build may take.
BUILD_SECONDS = 900.0
#: What a base image needs, as packages of Debian.
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
_WITHOUT_SYSTEMD = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def reason_to_skip() -> str | None:
    """Returns why no container can be run here, or None if they can."""
    if sys.platform != "linux" or shutil.which("podman") is None:
        return "podman is not installed"
    if os.geteuid() != 0:
        return "needs root, for networks between containers"
    if "TENSORPLAY_TEST_BASE" not in os.environ and shutil.which("debootstrap") is None:
        return "no base image: set TENSORPLAY_TEST_BASE, or install debootstrap"
    return None


class Engine:
    """podman with the settings of this machine.

    Args:
        folder: Where the settings are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.environment = dict(os.environ)
        self._folder = folder
        if not Path("/run/systemd/system").is_dir():
            settings = folder / "containers.conf"
            settings.write_text(_WITHOUT_SYSTEMD, encoding="utf-8")
            self.environment["CONTAINERS_CONF"] = str(settings)

    def run(self, *arguments: str, timeout: float = PATIENCE) -> str:
        """Runs a command of podman and returns what it prints."""
        done = self.attempt(*arguments, timeout=timeout)
        assert done.returncode == 0, f"podman {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def attempt(
        self, *arguments: str, timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of podman that may fail."""
        return subprocess.run(
            ["podman", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def inspect(self, name: str) -> dict[str, Any]:
        """Returns what podman knows of an image or a container."""
        found: list[dict[str, Any]] = json.loads(self.run("inspect", name))
        return found[0]

    def base(self) -> str:
        """Returns the name of the base image, which is there afterwards."""
        if name := os.environ.get("TENSORPLAY_TEST_BASE"):
            return name
        if self.attempt("image", "exists", OWN_BASE).returncode:
            self._make_base()
        return OWN_BASE

    def _make_base(self) -> None:
        root = self._folder / "base"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=BUILD_SECONDS,
        )
        archive = self._folder / "base.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, timeout=300)
        self.run("import", "--change", "CMD /bin/bash", str(archive), OWN_BASE, timeout=300)
        shutil.rmtree(root)
        archive.unlink()

    def build(self, what: str, tag: str, *options: str) -> float:
        """Builds ``docker/WHAT.Dockerfile`` and returns the seconds that it took.

        The packages come from where this machine's pip has them from.
        """
        settings, mounts = _pip_settings()
        secret = self._folder / "pip.conf"
        secret.write_text(settings, encoding="utf-8")
        started = time.monotonic()
        self.run(
            *("build", "--network=host", "--isolation=chroot", "--format=docker"),
            *("--secret", f"id=pip,src={secret}"),
            *(f"--volume={path}:{path}:ro" for path in mounts),
            *("--build-arg", f"BASE={self.base()}", "--file", f"docker/{what}.Dockerfile"),
            *("--tag", tag, *options, str(ROOT)),
            timeout=BUILD_SECONDS,
        )
        return time.monotonic() - started


def _pip_settings() -> tuple[str, list[str]]:
    """Returns this machine's configuration of pip, and the local files and folders it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    ).stdout
    options: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        options[name.rpartition(".")[2]] = value.strip("'\"")
    options.pop("constraint", None)  # the project has its own
    paths = [word.removeprefix("file://") for value in options.values() for word in value.split()]
    mounts = {path.removesuffix("/simple") for path in paths if Path(path).is_absolute()}
    lines = ["[global]", *(f"{name} = {value}" for name, value in options.items())]
    return "\n".join(lines) + "\n", sorted(path for path in mounts if Path(path).exists())


class Cluster:
    """Containers on a private network; used as a context manager, gone at its end.

    Args:
        engine: Runs them.
        images: Names of the images, by ``broker`` and ``worker``.
        options: Further options of the network.
    """

    def __init__(self, engine: Engine, images: dict[str, str], *options: str) -> None:
        self.engine = engine
        self.images = images
        self._prefix = f"tensorplay-test-{uuid.uuid4().hex[:8]}"
        self._options = options
        self._names: list[str] = []
        self._followers: list[Follower] = []

    def __enter__(self) -> Cluster:
        self.engine.run("network", "create", *self._options, self._prefix)
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            if error[0] is not None:
                print(f"--- {name}\n{self.logs(name)}")
            self.engine.attempt("rm", "--force", "--time", "0", self.full(name))
        for follower in self._followers:
            follower.close()
        self.engine.run("network", "rm", "--force", self._prefix)

    def full(self, name: str) -> str:
        """Returns podman's name of a container, which is found as ``name`` on the network."""
        return f"{self._prefix}-{name}"

    def start(self, name: str, image: str, *arguments: str, options: Sequence[str] = ()) -> None:
        """Starts a container in the background, with a root that it cannot write to."""
        self._names.append(name)
        self.engine.run("run", "--detach", *self._common(name, options, image), *arguments)

    def broker(self, *options: str) -> None:
        """Starts a broker and waits until it is well."""
        self.start("broker", "broker", options=["--env=TENSORPLAY_INSECURE=1", *options])
        self.wait_well()

    def worker(self, name: str, *options: str, broker: str = "tcp://broker:5555") -> None:
        """Starts a worker."""
        variables = [f"--env=TENSORPLAY_BROKER={broker}", f"--env=TENSORPLAY_NAME={name}"]
        self.start(name, "worker", options=[*variables, *options])

    def run_python(
        self, name: str, script: Path, *arguments: str, options: Sequence[str] = ()
    ) -> Follower:
        """Runs a script in a container of its own and follows what it prints."""
        self._names.append(name)
        mount = [f"--volume={script}:/work/{script.name}:ro", "--entrypoint=python"]
        common = self._common(name, [*mount, *options], "worker")
        command = ["podman", "run", "--interactive", *common, script.name, *arguments]
        follower = Follower(command, self.engine.environment)
        self._followers.append(follower)
        return follower

    def _common(self, name: str, options: Sequence[str], image: str) -> list[str]:
        return [
            *("--name", self.full(name), "--hostname", name, "--network", self._prefix),
            *("--network-alias", name, "--read-only", "--cap-drop=ALL"),
            # While a container restarts, its name is asked of servers that may never answer.
            *("--dns-option=timeout:1", "--dns-option=attempts:1", *options),
            self.images[image],
        ]

    def logs(self, name: str) -> str:
        """Returns what a container has printed."""
        done = self.engine.attempt("logs", self.full(name))
        return done.stdout + done.stderr

    def wait_well(self, name: str = "broker") -> None:
        """Waits until a container's health check passes."""
        deadline = time.monotonic() + PATIENCE
        while self.engine.attempt("healthcheck", "run", self.full(name)).returncode:
            assert time.monotonic() < deadline, f"{name} is not well:\n{self.logs(name)}"
            time.sleep(0.2)

    def address(self, name: str, *, version: int = 4) -> str:
        """Returns a container's address on the network."""
        network = self.engine.inspect(self.full(name))["NetworkSettings"]["Networks"][self._prefix]
        found: str = network["IPAddress" if version == 4 else "GlobalIPv6Address"]
        return found
