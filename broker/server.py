"""The broker's loop around one ROUTER socket: receives, asks the state, sends.

With the check, the only file of the broker that knows ZeroMQ.  The loop waits on the socket's file
descriptor instead of polling for POLLOUT, which on a ROUTER fires while *any* peer has
room: the descriptor wakes it also when a peer that was full has read something, and when
a connection ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket as socket_module
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq

from tensorplay.broker.authenticator import Access, Authenticator
from tensorplay.broker.config import BrokerConfig, needs_ipv6
from tensorplay.broker.events import (
    Command,
    Event,
    Forget,
    Forward,
    Overflowed,
    Probe,
    Reachable,
    Received,
    Send,
    Tick,
    Unreachable,
)
from tensorplay.broker.outbound import Frames, Outbound
from tensorplay.broker.state import BrokerState
from tensorplay.broker.status import snapshot
from tensorplay.errors import BrokerError, ProtocolError
from tensorplay.protocol import wire
from tensorplay.protocol.messages import CHUNK_BYTES, Route

if TYPE_CHECKING:
    from tensorplay.broker.http import Site

_log = logging.getLogger(__name__)

#: Largest frame that is let in: a chunk and what a header may add.
MAX_FRAME_BYTES = 16 * CHUNK_BYTES
#: Messages that ZeroMQ itself keeps for a peer; the rest waits in ``Outbound``.
_HIGH_WATER_MARK = 16
#: Up to this size, copying a message costs less than a Frame object for each frame.
_COPY_BYTES = 16 << 10
#: Messages received before those that wait are tried again.
_ROUND = 256
#: Seconds after which full peers are tried again even if nothing woke the loop.
_RETRY_SECONDS = 0.01
#: A snapshot for the dashboard may take this share of the loop's time.
_PUBLISHING_SHARE = 0.01
#: Milliseconds that the last messages may take when the broker ends.
_LINGER = 200


class Broker:
    """A broker, embedded in this process.

    Use it as a context manager, or call ``start`` and ``close``, or ``run`` in a thread
    of your own.

    Args:
        config: The options.
        context: The ZeroMQ context to use; by default one of its own.

    Example:
        >>> with Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",))) as broker:
        ...     print(broker.address)  # doctest: +SKIP
        tcp://127.0.0.1:43211
    """

    def __init__(
        self, config: BrokerConfig | None = None, *, context: zmq.Context[Any] | None = None
    ) -> None:
        self.config = config or BrokerConfig()
        self._own_context = context is None
        self._context: zmq.Context[Any] | None = context
        self._socket: zmq.Socket[bytes] | None = None
        self._outbound = Outbound(self.config.queue_bytes)
        self._access = Access(Path(self.config.curve_dir)) if self.config.curve_dir else None
        self._authenticator: Authenticator | None = None
        self._state = BrokerState(
            self.config,
            incarnation=secrets.randbits(63) | 1,
            now=time.monotonic(),
            queued_bytes=self._outbound.queued_bytes,
            grants=None if self._access is None else self._access.grants,
        )
        self._site: Site | None = None
        self._next_publication = 0.0
        self._thread: threading.Thread | None = None
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        self._stopping = False
        self._stop_by = 0.0
        self._empty_by: float | None = None  # when to end whoever is still here
        self._closed = False

    # For any thread.

    @property
    def address(self) -> str:
        """The first endpoint that the broker listens at."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """All endpoints that the broker listens at, with the ports that were chosen."""
        return self._state.addresses

    @property
    def url(self) -> str | None:
        """Where the dashboard is, if there is one."""
        return None if self._site is None else self._site.url

    @property
    def stopping(self) -> bool:
        """Whether the broker was told to stop."""
        return self._stopping

    def start(self) -> Broker:
        """Listens, and runs the broker in a thread, unless it already does.

        Raises:
            BrokerError: If an endpoint cannot be listened at.
        """
        if self._thread is not None:
            return self
        self.bind()
        self._thread = threading.Thread(target=self._run, name="tensorplay-broker", daemon=True)
        self._thread.start()
        return self

    def run(self) -> None:
        """Listens, and runs the broker in this thread until ``stop`` is called.

        Raises:
            BrokerError: If an endpoint cannot be listened at.
        """
        self.bind()
        self._run()

    def stop(self, drain_timeout: float = 0.0) -> None:
        """Makes the broker end soon; safe in any thread and in a signal handler.

        Args:
            drain_timeout: Seconds that what waits for slow peers has to go out.
        """
        self._stop_by = time.monotonic() + drain_timeout
        self._stopping = True
        self._wake()

    def drain(self, timeout: float) -> None:
        """Makes the broker end when its last peer has left, or ``timeout`` seconds later."""
        self._empty_by = time.monotonic() + timeout
        self._wake()

    def close(self) -> None:
        """Ends the broker and waits for its thread; may be called more than once."""
        if self._closed:
            return
        self.stop()
        if self._thread is not None:
            self._thread.join()
        self._closed = True
        self._close_socket()
        if self._site is not None:
            self._site.close()
        os.close(self._wake_out)
        os.close(self._wake_in)

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def bind(self) -> None:
        """Begins to listen; ``start`` and ``run`` do so by themselves.

        Raises:
            BrokerError: If an endpoint cannot be listened at.
        """
        if self._socket is not None:
            return
        if self._context is None:
            self._context = zmq.Context()
        socket = self._socket = self._context.socket(zmq.ROUTER)
        silence = int(self.config.heartbeat_timeout * 1000)
        for option, value in {
            zmq.ROUTER_MANDATORY: 1,  # an error instead of silence for who is gone or full
            zmq.SNDHWM: _HIGH_WATER_MARK,
            zmq.RCVHWM: _HIGH_WATER_MARK,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.LINGER: _LINGER,
            zmq.BACKLOG: 1024,
            zmq.HANDSHAKE_IVL: int(self.config.handshake_timeout * 1000),
            # Answered by libzmq's own thread, so that a busy peer is not taken for dead.
            zmq.HEARTBEAT_IVL: int(self.config.heartbeat_interval * 1000),
            zmq.HEARTBEAT_TIMEOUT: silence,
            zmq.HEARTBEAT_TTL: silence,
            # Middle boxes forget idle connections.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 60,
            zmq.TCP_KEEPALIVE_INTVL: 15,
            zmq.TCP_KEEPALIVE_CNT: 4,
        }.items():
            socket.setsockopt(option, value)
        if self._access is not None:
            self._authenticator = Authenticator(self._context, self._access.grants)
            self._access.guard(socket)
        addresses = []
        for endpoint in self.config.bind:
            socket.setsockopt(zmq.IPV6, int(needs_ipv6(endpoint)))
            try:
                _check_unused(endpoint)
                socket.bind(endpoint)
            except (OSError, zmq.ZMQError) as error:
                self._close_socket()
                raise BrokerError(f"cannot listen at {endpoint}: {error.strerror}") from None
            addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._state.addresses = tuple(addresses)
        self._open_site()

    def _open_site(self) -> None:
        address = self.config.http_address
        if address is None:
            return
        try:
            from tensorplay.broker.http import Site
        except ImportError as error:
            self._close_socket()
            raise BrokerError(
                f"the dashboard (--http) needs {error.name}: pip install 'tensorplay-broker[http]'"
            ) from None
        try:
            self._site = Site(address, self.config.http_token)
        except BrokerError:
            self._close_socket()
            raise
        self._publish(time.monotonic())
        self._site.start()

    # For the thread that runs the broker.

    def _run(self) -> None:
        assert self._socket is not None
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLIN)
        poller.register(self._wake_out, select.POLLIN)
        try:
            while not self._done():
                self._turn(poller)
        except Exception:
            _log.exception("the broker failed")
            raise
        finally:
            self._close_socket()

    def _done(self) -> bool:
        if self._stopping:
            return not self._outbound or time.monotonic() >= self._stop_by
        if self._empty_by is None:
            return False
        return not self._state.registry or time.monotonic() >= self._empty_by

    def _turn(self, poller: select.poll) -> None:
        began = time.monotonic()
        if not self._receive() and not self._done():
            # Nothing may be done to the socket between the last look and the wait: the
            # descriptor tells of a change once.
            for descriptor, _ in poller.poll(self._wait_seconds() * 1000):
                if descriptor == self._wake_out:
                    os.read(self._wake_out, 4096)
            began = time.monotonic()
        self._retry()
        now = time.monotonic()
        self._state.health.turn(now - began)
        if now >= self._state.next_tick():
            self._state.health.sample(now)
            self._handle(Tick(), now)
            if self._site is not None and now >= self._next_publication:
                self._publish(now)

    def _publish(self, now: float) -> None:
        """Gives the dashboard a snapshot; the next one comes later the longer this one took."""
        assert self._site is not None
        began = time.thread_time()
        ready = not self._stopping and self._empty_by is None
        self._site.publish(snapshot(self._state, now, samples=True), ready=ready)
        self._next_publication = now + (time.thread_time() - began) / _PUBLISHING_SHARE

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        until = self._state.next_tick()
        if self._empty_by is not None:
            until = min(until, self._empty_by)
        if self._outbound:
            until = min(until, now + _RETRY_SECONDS)
        # A millisecond late rather than a turn too early.
        return max(0.0, until - now) + 0.001

    def _receive(self) -> bool:
        """Handles what has come, up to a round; returns whether there may be more."""
        socket = self._socket
        assert socket is not None
        for _ in range(_ROUND):
            key = ""
            try:
                if self._access is None:
                    identity = socket.recv(zmq.DONTWAIT)
                else:
                    sender = socket.recv(zmq.DONTWAIT, copy=False)
                    identity, key = sender.bytes, str(sender.get("User-Id"))
            except zmq.Again:
                return False
            header = socket.recv() if socket.getsockopt(zmq.RCVMORE) else b""
            frames: list[Any] = [header]
            size = 0
            if more := socket.getsockopt(zmq.RCVMORE):
                # The second frame is a small header, too.
                frame: Any = socket.recv()
                frames.append(frame)
                size = len(frame)
                if more := socket.getsockopt(zmq.RCVMORE):
                    copy = _is_small(header)
                while more:
                    frame = socket.recv(copy=copy)
                    frames.append(frame)
                    size += len(frame)
                    more = socket.getsockopt(zmq.RCVMORE)
            self._handle(Received(identity, header, size, key), time.monotonic(), frames)
        return True

    def _handle(self, event: Event, now: float, frames: Frames = ()) -> None:
        """Tells the state of an event and does what it says, and what follows from that."""
        todo: deque[Command] = deque(self._state.handle(event, now))
        while todo:
            command = todo.popleft()
            outcome = self._do(command, frames)
            if outcome is not None:
                todo.extend(self._state.handle(outcome, now))

    def _do(self, command: Command, frames: Frames) -> Event | None:
        if isinstance(command, Forward):
            return self._forward(command, frames)
        if isinstance(command, Send):
            return self._send_control(command)
        if isinstance(command, Probe):
            try:
                self._send(command.identity, (command.header,))
            except zmq.ZMQError:
                return Unreachable(command.identity)
            return Reachable(command.identity)
        assert isinstance(command, Forget)
        self._outbound.drop(command.identity)
        return None

    def _forward(self, command: Forward, frames: Frames) -> Event | None:
        identity = command.identity
        try:
            if identity not in self._outbound and self._send(identity, frames):
                return None
        except zmq.ZMQError:
            return Unreachable(identity)
        if self._outbound.put(identity, frames, command.size, data=True):
            return None
        return Overflowed(command)

    def _send_control(self, command: Send) -> Event | None:
        identity, frames = command.identity, (command.header,)
        try:
            if identity not in self._outbound and self._send(identity, frames):
                return None
        except zmq.ZMQError:
            return Unreachable(identity)
        if self._outbound.put(identity, frames, len(command.header), data=False):
            return None
        return Unreachable(identity, "it does not read its messages")

    def _retry(self) -> None:
        """Sends what waits, as far as its receivers take it."""
        for identity in self._outbound.waiting():
            try:
                while (frames := self._outbound.first(identity)) is not None:
                    if not self._send(identity, frames):
                        break
                    self._outbound.pop(identity)
            except zmq.ZMQError:
                self._handle(Unreachable(identity), time.monotonic())

    def _send(self, identity: bytes, frames: Sequence[Any]) -> bool:
        """Sends a message; returns False if the peer takes none now.

        Raises:
            zmq.ZMQError: If the connection is gone.
        """
        socket = self._socket
        assert socket is not None
        try:
            socket.send(identity, zmq.DONTWAIT | zmq.SNDMORE)
        except zmq.Again:
            return False
        # Only the first frame can be refused.
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            copy = isinstance(frame, bytes)
            socket.send(frame, zmq.SNDMORE if index < last else 0, copy=copy)
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, which wakes as well, or closed
            os.write(self._wake_in, b"\0")

    def _close_socket(self) -> None:
        if self._socket is not None:
            rest = int((self._stop_by - time.monotonic()) * 1000)
            self._socket.close(linger=max(_LINGER, rest))
            self._socket = None
            if self._authenticator is not None:
                self._authenticator.close()
            for endpoint in self.addresses:
                if endpoint.startswith("ipc://"):  # ZeroMQ leaves the file behind
                    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        if self._own_context and self._context is not None:
            self._context.term()
            self._context = None


def _is_small(header: bytes) -> bool:
    """Returns whether the frames behind a header are cheaper to copy than to share."""
    try:
        message = wire.decode(header)
    except ProtocolError:
        return True
    return not isinstance(message, Route) or message.size <= _COPY_BYTES


def _check_unused(endpoint: str) -> None:
    """Raises OSError if somebody listens at an ipc endpoint, which ZeroMQ would take away."""
    if not endpoint.startswith("ipc://"):
        return
    with socket_module.socket(socket_module.AF_UNIX) as probe:
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
