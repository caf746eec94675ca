"""The connection to the broker: one DEALER socket, one thread that owns it.

The thread runs the session and the outbox; every other thread only appends to ``_posted``
and wakes it.  Handlers are called in it and must not block, nor run a user's code.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import zmq

from tensorplay.distributed.rpc.address import BrokerAddress
from tensorplay.errors import ProtocolError
from tensorplay.protocol import wire
from tensorplay.protocol.messages import (
    CHUNK_BYTES,
    Hello,
    Kind,
    Refused,
    Route,
    Undeliverable,
    Welcome,
)
from tensorplay.protocol.outbox import Frames, Outbox
from tensorplay.protocol.session import (
    BrokerLost,
    Closed,
    Command,
    NotDelivered,
    PeersChanged,
    PeerSession,
    Registered,
    Rejected,
    Send,
    State,
)

_log = logging.getLogger(__name__)

#: Payloads up to this size are received by copying: cheaper than a Frame object each.
_COPY_BYTES = 8 << 10
#: Messages handled before the loop looks at its other duties.
_ROUND = 256
#: Seconds without an answer to HELLO after which a new socket resolves the address again.
_RECONNECT_SECONDS = 5.0


class Handlers(Protocol):
    """What the link tells its owner, always in the link's thread."""

    def on_registered(self, welcome: Welcome, again: bool) -> None:
        """This peer is registered, for the first time or again."""

    def on_rejected(self, refused: Refused) -> None:
        """The broker refused this peer; the link is at its end."""

    def on_peers(self, changed: PeersChanged) -> None:
        """The roster has changed."""

    def on_broker_lost(self, silent_for: float) -> None:
        """The broker is silent; the link keeps trying."""

    def on_message(self, route: Route, frames: list[bytes | memoryview]) -> None:
        """A REQUEST, REPLY, CHUNK or CANCEL came in; ``frames`` are those behind the route."""

    def on_undeliverable(self, report: Undeliverable) -> None:
        """A message reached nobody."""

    def on_tick(self, now: float) -> float:
        """Does what is due and returns when it wants to be called again."""

    def stats(self) -> dict[str, float]:
        """What this peer tells the broker of itself."""


class Link:
    """Connects to a broker, stays registered there, sends and receives.

    Args:
        address: Where the broker is.
        hello: The registration to ask for.
        handlers: The owner.
        window: Bytes under way to one peer before it has consumed them.
    """

    def __init__(
        self, address: BrokerAddress, hello: Hello, handlers: Handlers, window: int
    ) -> None:
        self._address = address
        self._handlers = handlers
        self._window = window
        self._session = PeerSession(hello)
        self._outbox = Outbox(window)
        self._posted: deque[Callable[[], None]] = deque()
        self._consumed: dict[int, int] = {}
        self._stuck: Frames | None = None  # taken from the outbox, but the socket was full
        self._signalled = False
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._connected_at = 0.0
        self._idle = threading.Event()
        self._closing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorplay-link", daemon=True)

    @property
    def thread(self) -> threading.Thread:
        """The thread that owns the socket."""
        return self._thread

    def start(self) -> None:
        """Starts to connect; the handlers hear of the rest."""
        self._thread.start()

    def send(self, route: Route, *frames: bytes | memoryview) -> None:
        """Sends a message whose payload is at most one chunk."""
        self._post(lambda: self._outbox.post(route, *frames))

    def send_stream(self, route: Route, header: bytes, payload: Sequence[memoryview]) -> None:
        """Sends a request or reply in chunks."""
        self._post(lambda: self._outbox.post_stream(route, header, payload))

    def consumed(self, src: int, size: int) -> None:
        """Grants ``src`` credit for bytes of its that have been dealt with."""
        if size:
            self._post(lambda: self._credit(src, size))

    def drop(self, dst: int) -> None:
        """Forgets what is waiting for a peer that is gone; in the link's thread only."""
        self._outbox.drop(dst)
        self._consumed.pop(dst, None)

    def wake(self) -> None:
        """Makes the thread look at its duties; never blocks."""
        if not self._signalled:
            self._signalled = True
            with suppress(OSError):  # full, which wakes as well, or closed
                os.write(self._wake_in, b"\0")

    def close(self, timeout: float, reason: str = "left") -> None:
        """Sends what is waiting, says goodbye and ends the thread.

        Args:
            timeout: Seconds until it ends whatever is still waiting.
            reason: What the others are told.
        """

        def leave() -> None:
            if not self._closing:
                self._closing = True
                self._leave_by = time.monotonic() + timeout
                self._reason = reason

        self._post(leave)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout + 5.0)

    def abandon(self) -> None:
        """Ends the thread at once, without a goodbye."""
        self._post(self._closed.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # The rest runs in the link's thread.

    _leave_by = 0.0
    _reason = ""

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self.wake()

    def _run(self) -> None:
        try:
            self._connect()
            self._do(self._session.start(time.monotonic()))
            while not self._closed.is_set():
                self._turn()
        except BaseException:
            _log.exception("the connection to the broker failed")
            raise
        finally:
            self._closed.set()
            if self._socket is not None:
                self._socket.close(linger=0)
            self._context.term()
            self._signalled = True  # a late wake() must not write to a file that was opened since
            os.close(self._wake_out)
            os.close(self._wake_in)

    def _turn(self) -> None:
        now = time.monotonic()
        wanted = self._handlers.on_tick(now)
        self._do(self._session.tick(now, self._handlers.stats()))
        self._reconnect_if_unanswered(now)
        wanted = min(wanted, self._session.next_tick())
        if self._closing:
            wanted = min(wanted, self._leave(now))
        self._flush()
        self._poll(max(0.0, wanted - time.monotonic()))
        self._receive()
        while self._posted:
            self._posted.popleft()()
        self._flush()

    def _poll(self, seconds: float) -> None:
        if self._posted:
            seconds = 0.0
        flags = zmq.POLLIN | (zmq.POLLOUT if self._stuck is not None else 0)
        poller = zmq.Poller()
        assert self._socket is not None
        poller.register(self._socket, flags)
        poller.register(self._wake_out, zmq.POLLIN)
        ready = dict(poller.poll(int(min(seconds, 60.0) * 1000 + 0.9)))
        if self._wake_out in ready:
            os.read(self._wake_out, 4096)
        # Cleared before the posted actions are run: what comes later wakes again.
        self._signalled = False

    def _receive(self) -> None:
        for _ in range(_ROUND):
            message = self._receive_one()
            if message is None:
                return
            head, frames = message
            now = time.monotonic()
            try:
                decoded = wire.decode(head)
            except ProtocolError as error:
                _log.warning("dropped a message of the broker: %s", error)
                continue
            if isinstance(decoded, Route):
                self._session.heard(now)
                self._routed(decoded, frames)
            else:
                self._do(self._session.receive(decoded, now))
            del message, frames  # an idle link must not keep the last payload alive

    def _receive_one(self) -> tuple[bytes, list[bytes | memoryview]] | None:
        socket = self._socket
        assert socket is not None
        try:
            head = socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        frames: list[bytes | memoryview] = []
        if not socket.getsockopt(zmq.RCVMORE):
            return head, frames
        frames.append(socket.recv())
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(copy=False)
            frames.append(frame.bytes if len(frame) <= _COPY_BYTES else frame.buffer)
        return head, frames

    def _routed(self, route: Route, frames: list[bytes | memoryview]) -> None:
        if route.kind == Kind.CREDIT:
            self._outbox.credit(route.src, route.size)
            return
        try:
            self._handlers.on_message(route, frames)
        except ProtocolError as error:
            _log.warning("dropped a message of peer %d: %s", route.src, error)

    def _credit(self, src: int, size: int) -> None:
        total = self._consumed.get(src, 0) + size
        if total * 4 < self._window:
            self._consumed[src] = total
            return
        self._consumed.pop(src, None)
        me = self._session.me
        if me is not None and src in self._session.peers:
            self._outbox.post_control(
                wire.encode(Route(Kind.CREDIT, src, me.incarnation, 0, total))
            )

    def _flush(self) -> None:
        """Sends while there is something that may go and the socket takes it."""
        registered = self._session.state in (State.REGISTERED, State.LEAVING)
        while self._stuck is not None or registered:
            frames = self._stuck if self._stuck is not None else self._outbox.take()
            if frames is None:
                return
            if not self._send(frames):
                self._stuck = frames
                return
            self._stuck = None

    def _send(self, frames: Frames) -> bool:
        socket = self._socket
        assert socket is not None
        last = len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                flags = zmq.DONTWAIT | (zmq.SNDMORE if index < last else 0)
                # The first frame is refused if the socket is full, a later one never is.
                socket.send(frame, flags, copy=len(frame) <= _COPY_BYTES)
        except zmq.Again:
            return False
        return True

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                # What is lost here (not connected, full) the session repeats in time.
                self._send((wire.encode(command.message),))
            elif isinstance(command, Registered):
                self._handlers.on_registered(command.welcome, command.again)
            elif isinstance(command, PeersChanged):
                self._handlers.on_peers(command)
            elif isinstance(command, NotDelivered):
                self._handlers.on_undeliverable(command.report)
            elif isinstance(command, BrokerLost):
                self._handlers.on_broker_lost(command.silent_for)
            elif isinstance(command, Rejected):
                self._handlers.on_rejected(command.refused)
                self._closed.set()
            elif isinstance(command, Closed):
                self._closed.set()

    def _leave(self, now: float) -> float:
        """Leaves once everything is sent or the time is up; returns when to look again."""
        if self._session.state is State.REGISTERED:
            if (self._stuck is None and self._outbox.empty) or now >= self._leave_by:
                self._do(self._session.leave(self._reason))
                self._goodbye_by = now + 1.0
        elif self._session.state is State.LEAVING:
            if now >= self._goodbye_by:  # the broker does not answer
                self._closed.set()
        else:
            self._closed.set()
        return now + 0.05

    _goodbye_by = 0.0

    def _reconnect_if_unanswered(self, now: float) -> None:
        if (
            self._session.state is State.REGISTERING
            and now - self._connected_at > _RECONNECT_SECONDS
        ):
            self._connect()

    def _connect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._stuck = None
        self._connected_at = time.monotonic()
        socket = self._socket = self._context.socket(zmq.DEALER)
        heartbeat = int(self._session.heartbeat_interval * 1000)
        silence = int(self._session.heartbeat_timeout * 1000)
        for option, value in {
            zmq.IMMEDIATE: 1,  # nothing is queued for a broker that is not there
            zmq.LINGER: 0,
            zmq.SNDHWM: 1024,
            # Unlimited: the window bounds what comes. libzmq answers no heartbeat while a
            # queue is full, so the broker would take a busy peer for dead, and it aborts the
            # process if it reconnects then.
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: 16 * CHUNK_BYTES,
            zmq.IPV6: int(self._address.needs_ipv6()),
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
            # Answered by libzmq's own thread: a process that computes with the GIL held
            # is alive, one that was stopped is not.
            zmq.HEARTBEAT_IVL: heartbeat,
            zmq.HEARTBEAT_TIMEOUT: silence,
            zmq.HEARTBEAT_TTL: silence,
            # Middle boxes forget idle connections.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 60,
            zmq.TCP_KEEPALIVE_INTVL: 15,
            zmq.TCP_KEEPALIVE_CNT: 4,
        }.items():
            socket.setsockopt(option, value)
        socket.connect(self._address.endpoint)
