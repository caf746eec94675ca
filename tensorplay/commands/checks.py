"""The checks of ``tensorplay doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import zmq

from tensorplay.commands import asking, figures
from tensorplay.errors import TensorPlayError
from tensorplay.protocol.messages import PROTOCOL_VERSION
from tensorplay.version import __version__

#: Open files that a peer needs at least.
_FILES = 1024
#: Shared memory below which large tensors soon go through the broker instead.
_SHARED_BYTES = 1 << 30
#: Round trips over which the time to the broker is taken.
_ROUNDS = 5
#: A time to the broker, in seconds, above which it is worth a look.
_SLOW = 0.05
#: Seconds by which clocks may differ.
_CLOCKS = 1.0
#: Peers whose clocks are looked at.
_PEERS = 32


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        level: Whether it is as it should be, worth a look, or keeps something from working.
        what: What was looked at.
        text: What was found.
        remedy: What to do about it; empty if nothing is to be done.
    """

    level: Literal["ok", "warning", "bad"]
    what: str
    text: str
    remedy: str = ""


def run(operator: asking.Operator) -> Iterator[Finding]:
    """Yields what is found about this host, the broker and its peers."""
    yield from _versions()
    yield from _shared_memory()
    yield from _limits()
    yield _reachable(operator)
    try:
        status = operator.status()
    except TensorPlayError as error:
        yield Finding("bad", "broker", str(error), "start one with: tensorplay broker")
        return
    yield from _broker(operator, status)
    yield from _peers(operator, status)


def _versions() -> Iterator[Finding]:
    text = (
        f"tensorplay {__version__} (protocol {PROTOCOL_VERSION}), Python "
        f"{platform.python_version()}, pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
    )
    yield Finding("ok", "versions", text)
    try:
        yield Finding("ok", "torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "warning", "torch", "not installed", "a broker needs none; workers and clients do"
        )
    if zmq.has("curve"):
        yield Finding("ok", "CURVE", "libzmq has it")
    else:
        yield Finding(
            "bad", "CURVE", "libzmq has been built without it", "install pyzmq from its wheels"
        )


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding(
            "warning",
            "shared memory",
            f"{folder} is not there or not writable",
            "tensors between processes of this host go through the broker",
        )
        return
    free = shutil.disk_usage(folder).free
    text = f"{figures.size(free)} free in {folder}"
    if free < _SHARED_BYTES:
        yield Finding(
            "warning", "shared memory", text, "in a container give it more (--shm-size, shm_size)"
        )
    else:
        yield Finding("ok", "shared memory", text)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        yield Finding("warning", "open files", text, f"raise it: ulimit -n {_FILES}")
    else:
        yield Finding("ok", "open files", text)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _reachable(operator: asking.Operator) -> Finding:
    endpoint = operator.address.endpoint
    if endpoint.startswith("ipc://"):
        path = Path(endpoint.removeprefix("ipc://"))
        if path.exists():
            return Finding("ok", "address", f"{path} is there")
        return Finding("bad", "address", f"{path} is not there", "does the broker listen there?")
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname, parts.port or 0), timeout=operator.timeout):
            return Finding(
                "ok", "address", f"{endpoint} ({', '.join(operator.address.resolve())}) listens"
            )
    except OSError as error:
        return Finding(
            "bad",
            "address",
            f"{endpoint} cannot be reached: {error.strerror or error}",
            "is the name right, does the broker listen at an address that this host reaches "
            "(--bind), and does a firewall let it pass?",
        )


def _broker(operator: asking.Operator, status: dict[str, Any]) -> Iterator[Finding]:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        operator.ask("time")
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    text = f"answers within {figures.seconds(median)}"
    if median > _SLOW:
        yield Finding("warning", "broker", text, "the network is slow, or the broker is busy")
    else:
        yield Finding("ok", "broker", text)
    broker = status["versions"]["tensorplay"]
    if broker == __version__:
        yield Finding("ok", "broker's version", broker)
    else:
        yield Finding(
            "warning",
            "broker's version",
            f"{broker}, here it is {__version__}",
            "install the same version on all sides",
        )
    if status["config"].get("insecure"):
        yield Finding(
            "warning",
            "security",
            "the broker asks nobody for a key, and other hosts reach it",
            "let in only known keys: tensorplay broker --curve-dir DIR",
        )
    clock = abs(status["wall_time"] - time.time())
    yield _clock("broker's clock", clock)
    for warning in status["warnings"]:
        yield Finding("warning", "broker", warning)


def _peers(operator: asking.Operator, status: dict[str, Any]) -> Iterator[Finding]:
    told = status["namespaces"].get(operator.address.namespace)
    if not told:
        yield Finding(
            "warning",
            "peers",
            f"none in namespace {operator.address.namespace!r}",
            f"start one with: tensorplay worker --broker {operator.address} --name worker0",
        )
        return
    for peer in told["peers"][:_PEERS]:
        what = f"peer {peer['name']}"
        try:
            began = time.perf_counter()
            answer = operator.ask("ping", peer["name"])
            took = time.perf_counter() - began
        except TensorPlayError as error:
            yield Finding("bad", what, str(error))
            continue
        versions = " ".join(f"{name} {version}" for name, version in peer["versions"].items())
        yield Finding("ok", what, f"answers within {figures.seconds(took)}; {versions}")
        clock = abs(answer["wall_time"] - time.time())
        if clock > _CLOCKS + took:
            yield _clock(f"clock of {peer['name']}", clock)


def _clock(what: str, difference: float) -> Finding:
    text = f"differs by {figures.seconds(difference)}"
    if difference > _CLOCKS:
        return Finding("warning", what, text, "logs cannot be compared; synchronise it (NTP)")
    return Finding("ok", what, text)
