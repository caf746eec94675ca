"""Peers made of a bare DEALER socket, and hellos for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import msgspec
import zmq

from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    DEFAULT_NAMESPACE,
    PROTOCOL_VERSION,
    Control,
    Goodbye,
    Heartbeat,
    Hello,
    Kind,
    Role,
    Route,
    Status,
    StatusRequest,
    Welcome,
)

T = TypeVar("T")

#: Seconds after which a test gives up waiting.
PATIENCE = 10.0


def hello(name: str, incarnation: int, **changes: Any) -> Hello:
    """Returns the registration of a worker without a rank, or what ``changes`` make of it."""
    plain = Hello(PROTOCOL_VERSION, name, DEFAULT_NAMESPACE, incarnation, Role.WORKER)
    return msgspec.structs.replace(plain, **changes)


class RawPeer:
    """A peer that does only what a test makes it do.

    Args:
        context: The ZeroMQ context.
        address: The broker's endpoint.
        options: Socket options.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, options: dict[int, int] | None = None
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
        for option, value in (options or {}).items():
            self.socket.setsockopt(option, value)
        self.socket.connect(address)
        self.incarnation = 0

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, message: Control | bytes, *frames: bytes) -> None:
        """Sends a control message, or any bytes."""
        header = message if isinstance(message, bytes) else wire.encode(message)
        self.socket.send_multipart([header, *frames])

    def route(self, kind: Kind, dst: int, number: int, *frames: bytes, **changes: Any) -> None:
        """Sends a routed message; ``changes`` make a liar of its header."""
        size = sum(map(len, frames))
        header = Route(kind, dst, self.incarnation, number, size)
        self.send(wire.encode(msgspec.structs.replace(header, **changes)), *frames)

    def register(self, name: str, incarnation: int, **changes: Any) -> Welcome:
        """Registers, and returns the broker's welcome."""
        self.incarnation = incarnation
        self.send(hello(name, incarnation, **changes))
        return self.expect(Welcome)

    def leave(self) -> None:
        """Says goodbye."""
        self.send(Goodbye())

    def receive(self, timeout: float = PATIENCE) -> list[bytes] | None:
        """Returns the next message, or None if none comes in time."""
        if not self.socket.poll(int(timeout * 1000)):
            return None
        return self.socket.recv_multipart()

    def expect(self, kind: type[T], timeout: float = PATIENCE) -> T:
        """Returns the next message of a kind; fails if another comes first (but heartbeats)."""
        frames = self.expect_frames(timeout, skip=kind is not Heartbeat)
        message = wire.decode(frames[0])
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    def expect_frames(self, timeout: float = PATIENCE, *, skip: bool = True) -> list[bytes]:
        """Returns the frames of the next message that is no heartbeat."""
        deadline = time.monotonic() + timeout
        while True:
            frames = self.receive(max(0.0, deadline - time.monotonic()))
            assert frames is not None, f"nothing came within {timeout} s"
            if not skip or not isinstance(wire.decode(frames[0]), Heartbeat):
                return frames

    def expect_nothing(self, timeout: float = 0.2) -> None:
        """Fails if anything but heartbeats comes."""
        deadline = time.monotonic() + timeout
        while (frames := self.receive(max(0.0, deadline - time.monotonic()))) is not None:
            message = wire.decode(frames[0])
            assert isinstance(message, Heartbeat), f"unexpected {message}"

    def status(self) -> dict[str, Any]:
        """Returns the broker's status."""
        self.send(StatusRequest())
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            frames = self.expect_frames()
            message = wire.decode(frames[0])
            if isinstance(message, Status):
                answer: dict[str, Any] = msgspec.json.decode(message.json)
                return answer
        raise AssertionError("the broker gave no status")


#: Connects a new raw peer: to an address, or to the test's broker.
Dial: TypeAlias = Callable[..., RawPeer]
Connect: TypeAlias = Callable[..., RawPeer]
