"""Hosts made of network namespaces: each has one address, and a cable to the same switch.

The switch is a bridge in a namespace of its own, so that nothing of this machine's network is
touched: no address, no route, no firewall.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.following import Follower

ROOT = Path(__file__).parents[2]
#: Reserved for examples; only used within the namespaces.
NETWORK = "192.0.2"


def reason_to_skip() -> str | None:
    """Returns why no namespaces can be made here, or None if they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs iproute2"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = f"tp-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


class Hosts:
    """Network namespaces that are cabled together; used as a context manager.

    Args:
        names: Of the hosts; they get the addresses 192.0.2.1, 192.0.2.2, ...
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"tp-{uuid.uuid4().hex[:6]}"
        self._names = list(names)
        self._followers: list[Follower] = []

    def __enter__(self) -> Hosts:
        try:
            self._cable()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for follower in reversed(self._followers):
            follower.close()
            if error and error[0] is not None:
                print(f"---\n{follower.output}")
        for name in ["switch", *self._names]:
            subprocess.run(["ip", "netns", "delete", self._namespace(name)], capture_output=True)

    def address(self, name: str) -> str:
        """Returns the address of a host."""
        return f"{NETWORK}.{self._names.index(name) + 1}"

    def start(self, name: str, *arguments: str, **environment: str) -> Follower:
        """Runs Python on a host; it finds the package and its tests."""
        command = ["ip", "netns", "exec", self._namespace(name), sys.executable, *arguments]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        follower = Follower(command, common | environment)
        self._followers.append(follower)
        return follower

    def unplug(self, name: str) -> None:
        """Pulls a host's cable."""
        self._ip("switch", "link", "set", name, "down")

    def plug(self, name: str) -> None:
        """Puts a host's cable back."""
        self._ip("switch", "link", "set", name, "up")

    def listeners(self, name: str) -> list[str]:
        """Returns the local addresses at which something on a host listens for TCP."""
        printed = self._run("netns", "exec", self._namespace(name), "ss", "-Hltn")
        return [line.split()[3] for line in printed.splitlines()]

    def _cable(self) -> None:
        self._run("netns", "add", self._namespace("switch"))
        self._ip("switch", "link", "add", "bridge", "type", "bridge")
        self._ip("switch", "link", "set", "bridge", "up")
        for name in self._names:
            namespace = self._namespace(name)
            self._run("netns", "add", namespace)
            self._ip(
                *("switch", "link", "add", name, "type", "veth"),
                *("peer", "name", "eth0", "netns", namespace),
            )
            self._ip("switch", "link", "set", name, "master", "bridge", "up")
            self._ip(name, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._ip(name, "link", "set", "eth0", "up")
            self._ip(name, "link", "set", "lo", "up")

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _ip(self, host: str, *arguments: str) -> str:
        return self._run("-n", self._namespace(host), *arguments)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
        return done.stdout
