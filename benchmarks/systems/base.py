"""What the harness asks of a system.

A system runs as a *group*: clients and workers, each a process of its own, and whatever else it
needs (a broker).  A ``Launcher`` lives in the harness and starts what is not a peer; a ``Peer``
lives in the process of a client or worker.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

#: A step of training: inputs and targets to the loss before the step.
Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Shape:
    """How many clients and workers a group has."""

    clients: int = 1
    workers: int = 1


@dataclass(frozen=True)
class PeerSpec:
    """What a peer's process is told.

    Attributes:
        system: Name of the system's module in this package.
        shape: The group's.
        index: The peer's number among all; workers come first.
        address: Where the group meets, as the launcher gave it.
        environment: Variables to set before anything is imported.
        threads: Threads for torch's operators.
    """

    system: str
    shape: Shape
    index: int
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1

    @property
    def is_client(self) -> bool:
        """Whether it measures, rather than serves."""
        return self.index >= self.shape.workers

    @property
    def name(self) -> str:
        """The name that the peer takes."""
        return peer_name(self.shape, self.index)


def peer_name(shape: Shape, index: int) -> str:
    """Returns the name of the peer with that number."""
    if index < shape.workers:
        return f"worker{index}"
    return f"client{index - shape.workers}"


class Pending(Protocol):
    """A call under way."""

    def wait(self) -> Any:
        """Waits for the call's result."""


class Peer(Protocol):
    """A peer of a group, in its own process.

    ``workers`` are handles of the group's workers, to be given to the methods.
    """

    workers: Sequence[Any]

    def call(self, worker: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function on a worker and returns its result."""

    def submit(self, worker: Any, function: Callable[..., Any], *args: Any) -> Pending:
        """Starts to run a function on a worker."""

    def layer(self, worker: Any, width: int) -> Callable[[Tensor], Tensor]:
        """Makes a ``Linear(width, width)`` on a worker and returns what calls it."""

    def trainer(self, workers: Sequence[Any], width: int) -> Step:
        """Makes a linear layer on each worker, in a chain, and returns a step of SGD.

        Raises:
            NotImplementedError: If the system cannot train through its workers.
        """

    def close(self) -> None:
        """Leaves the group."""


class Launcher(Protocol):
    """What of a group is not a peer."""

    #: Where the group's peers meet.
    address: str
    #: Variables that its peers need.
    environment: Mapping[str, str]
    #: Process id of the broker, if there is one.
    broker_pid: int | None
    #: Whether the workers are processes that the harness starts.
    starts_workers: bool
    #: Whether its idle peers are to be stopped while another system is measured.
    stops_when_idle: bool

    def close(self) -> None:
        """Ends what it has started."""


def launch(system: str, options: Mapping[str, str]) -> Launcher:
    """Starts what a group of that system needs beside its peers."""
    launcher: Launcher = _module(system).launch(options)
    return launcher


def join(spec: PeerSpec) -> Peer:
    """Makes this process a peer of its group."""
    peer: Peer = _module(spec.system).join(spec)
    return peer


def _module(system: str) -> Any:
    return importlib.import_module(f"benchmarks.systems.{system}_system")


def free_port() -> int:
    """Returns a port of the loopback interface at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
