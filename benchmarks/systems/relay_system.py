"""Bare ZeroMQ: what a message through a broker in Python costs when nobody does anything else.

A ROUTER that copies messages from one DEALER to another, a worker that sends them back, and no
pickling, no futures, no bookkeeping: the floor under the calls of tensorplay.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import zmq
from torch import Tensor

from benchmarks.systems.base import PeerSpec, Step, peer_name


class RelayLauncher:
    """Runs the relay in a process of its own."""

    starts_workers = True
    stops_when_idle = False
    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.broker_pid: int | None = self._process.pid
        self.address = self._process.stdout.readline().strip()

    def close(self) -> None:
        """Ends the relay."""
        self._process.kill()
        self._process.communicate()


def _relay() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        print(f"tcp://127.0.0.1:{port}", flush=True)
        while True:
            sender, receiver, *frames = router.recv_multipart(copy=False)
            router.send_multipart((receiver, sender, *frames), copy=False)


def _end_with_parent() -> None:
    sys.stdin.read()
    raise SystemExit


class RelayPeer:
    """A DEALER; a worker's sends back whatever comes."""

    def __init__(self, spec: PeerSpec) -> None:
        self.workers: Sequence[bytes] = [
            peer_name(spec.shape, index).encode() for index in range(spec.shape.workers)
        ]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = spec.name.encode()
        self._socket.linger = 0
        self._socket.connect(spec.address)
        if spec.is_client:
            while not self._reaches(self.workers[0]):
                pass
        else:
            threading.Thread(target=self._serve, daemon=True).start()

    def _reaches(self, worker: bytes) -> bool:
        self._socket.send_multipart((worker, b""))
        return bool(self._socket.poll(100))

    def _serve(self) -> None:
        while True:
            self._socket.send_multipart(self._socket.recv_multipart(copy=False), copy=False)

    def call(self, worker: bytes, function: Callable[..., Any], *args: Any) -> None:
        """Has an empty message make the way of a call; nothing is run."""
        del function, args
        self._socket.send_multipart((worker, b""))
        self._socket.recv_multipart()

    def submit(self, worker: bytes, function: Callable[..., Any], *args: Any) -> Any:
        """Is not there."""
        raise NotImplementedError("a bare relay has no futures")

    def layer(self, worker: bytes, width: int) -> Callable[[Tensor], Tensor]:
        """Is not there."""
        raise NotImplementedError("a bare relay runs nothing")

    def trainer(self, workers: Sequence[bytes], width: int) -> Step:
        """Is not there."""
        raise NotImplementedError("a bare relay trains nothing")

    def close(self) -> None:
        """Leaves; what still waits is given up with the process."""


def launch(options: Mapping[str, str]) -> RelayLauncher:
    """Starts a relay."""
    del options
    return RelayLauncher()


def join(spec: PeerSpec) -> RelayPeer:
    """Connects to the relay."""
    return RelayPeer(spec)


if __name__ == "__main__":
    _relay()
