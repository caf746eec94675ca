"""The connection to the broker: one DEALER socket, used by one thread at a time.

Whoever holds ``_using`` may use the socket, the session and the outbox.  The link's own
thread waits for messages and for time to pass.  Other threads append to ``_posted``; one
that finds the socket free sends what was posted itself, and handles what has come
meanwhile, which saves a change of threads.  What is posted while the socket is in use is
sent by who uses it, together.

Handlers are called by whoever uses the socket, one at a time; they must not block, nor
run a user's code.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq

from tensorplay.address import BrokerAddress
from tensorplay.distributed.rpc import tracing
from tensorplay.distributed.rpc.dealer import Change, Dealer, Frame
from tensorplay.distributed.rpc.handshakes import Handshakes
from tensorplay.errors import ProtocolError, TensorPlayError
from tensorplay.protocol import batch, wire
from tensorplay.protocol.messages import (
    PROTOCOL_VERSION,
    Answer,
    Ask,
    Control,
    Heartbeat,
    Hello,
    Kind,
    Refused,
    Route,
    Undeliverable,
    Welcome,
)
from tensorplay.protocol.outbox import Frames, Outbox, Verdict
from tensorplay.protocol.session import (
    Answered,
    Asked,
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

#: Messages handled before the loop looks at its other duties.
_ROUND = 256
#: Seconds without an answer to HELLO after which a new socket resolves the address again.
_RECONNECT_SECONDS = 5.0
#: Seconds after a failed handshake until a new socket tries again, where ZeroMQ does not.
_AGAIN_SECONDS = 1.0
#: What a broker does to a peer whose key is not in its folder.
_NO = "refused this peer's key; `tensorplay keys allow` at the broker lets it in"
#: Seconds that the broker has to answer a GOODBYE.
_GOODBYE_SECONDS = 1.0


class Handlers(Protocol):
    """What the link tells its owner, one call at a time."""

    def on_registered(self, welcome: Welcome, again: bool) -> None:
        """This peer is registered, for the first time or again."""

    def on_rejected(self, refused: Refused) -> None:
        """The broker refused this peer; the link is at its end."""

    def on_failed(self, error: BaseException) -> None:
        """The link is at its end because of an error in this process."""

    def on_peers(self, changed: PeersChanged) -> None:
        """The roster has changed."""

    def on_forgotten(self, incarnation: int) -> None:
        """A peer had given this one up, and is in touch again."""

    def on_broker_lost(self, silent_for: float) -> None:
        """The broker is silent; the link keeps trying."""

    def on_message(self, route: Route, frames: Sequence[Frame]) -> None:
        """A REQUEST, REPLY, CHUNK or CANCEL came in; ``frames`` are those behind the route."""

    def on_undeliverable(self, report: Undeliverable) -> None:
        """A message reached nobody and never will."""

    def on_asked(self, ask: Ask) -> None:
        """An operator asks something of this peer."""

    def on_answered(self, answer: Answer) -> None:
        """The broker has answered a question of this peer."""

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
        handshakes: Has the keys to use, and hears of handshakes that fail.
    """

    def __init__(
        self,
        address: BrokerAddress,
        hello: Hello,
        handlers: Handlers,
        window: int,
        handshakes: Handshakes,
    ) -> None:
        self._address = address
        self._handlers = handlers
        self._handshakes = handshakes
        self._session = PeerSession(hello)
        self._outbox = Outbox(hello.incarnation, window)
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._stuck: Frames | None = None  # taken from the outbox, but the socket was full
        self._using = threading.Lock()
        self._due = False  # whether the thread is to look at its duties once more
        self._asleep = False
        self._sleeps_until = 0.0  # the thread, at most
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._context: zmq.Context[Any] = zmq.Context()
        self._dealer: Dealer | None = None
        self._window = window
        self._room = threading.Condition()
        self._entered: dict[int, int] = {}  # bytes for each peer since the two met
        self._waiting_for_room = 0
        self._pumping = 0  # the thread that holds ``_using`` in ``pump``
        self._poller = select.poll()
        self._connected_at = 0.0
        self._connect_again_at = math.inf
        self._leaving = False
        self._leave_by = 0.0
        self._goodbye_by = 0.0
        self._reason = ""
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._complained: set[int] = set()  # peers of which a message was dropped
        self._thread = threading.Thread(target=self._run, name="tensorplay-link", daemon=True)

    @property
    def thread(self) -> threading.Thread:
        """The thread that waits for messages."""
        return self._thread

    def start(self) -> None:
        """Starts to connect; the handlers hear of the rest."""
        self._thread.start()

    def send(self, dst: int, kind: Kind, id: int, size: int, *frames: Frame) -> None:
        """Queues a message whose payload is at most one chunk; ``wake`` or ``pump`` sends it."""
        self._enter(dst, size)
        self._posted.append((self._outbox.post, (dst, kind, id, size, frames)))

    def send_stream(
        self, dst: int, kind: Kind, id: int, size: int, header: bytes, payload: Sequence[memoryview]
    ) -> None:
        """Queues a request or reply that goes in chunks; ``wake`` or ``pump`` sends it."""
        self._enter(dst, size)
        self._posted.append((self._outbox.post_stream, (dst, kind, id, size, header, payload)))

    def tell(self, message: Control) -> None:
        """Sends the broker a message of its own; it may be lost."""
        self._posted.append((self._do, ([Send(message)],)))
        self.wake()

    def stop(self) -> None:
        """Has the thread end without a goodbye; never blocks."""
        self._posted.append((self._closed.set, ()))
        self.wake()

    def full(self, dst: int) -> bool:
        """Returns whether a window's bytes wait for a peer, here or there: then send no more."""
        return self._entered.get(dst, 0) - self._outbox.finished(dst) >= self._window

    def wait_for_room(self, dst: int, timeout: float | None) -> None:
        """Waits until a peer is not ``full`` any more, or has gone, or the time is up.

        Whoever runs the handlers does not wait: what makes room comes by way of them.
        """
        if threading.get_ident() in (self._thread.ident, self._pumping):
            return
        with self._room:
            self._waiting_for_room += 1
            try:
                self._room.wait_for(lambda: self._closed.is_set() or not self.full(dst), timeout)
            finally:
                self._waiting_for_room -= 1

    def post(self, action: Callable[[], None]) -> None:
        """Has ``action`` run by who sends what is posted next; it must not block."""
        self._posted.append((action, ()))

    def progress(self, dst: int, id: int) -> tuple[int, int]:
        """Returns how many bytes of a large request have been sent, and of how many."""
        return self._outbox.progress(dst, id)

    def consumed(self, src: int, size: int) -> None:
        """Grants ``src`` credit for bytes of its that have been dealt with."""
        if size:
            self._posted.append((self._consumed, (src, size)))
            self.wake()

    def drop(self, peer: int) -> None:
        """Forgets what is waiting for a peer that is gone."""
        self._posted.append((self._drop, (peer,)))
        self.wake()

    def wake(self) -> None:
        """Makes the thread look at its duties; never blocks."""
        self._due = True
        if self._asleep:
            self._asleep = False
            with suppress(OSError):  # full, which wakes as well, or closed
                os.write(self._wake_in, b"\0")

    def pump(self) -> None:
        """Sends what was posted in this thread if the socket is free, else has it sent.

        Never in the main thread, where a signal's handler may raise at any point and leave half
        a message behind.
        """
        if threading.current_thread() is threading.main_thread() or not self._using.acquire(
            blocking=False
        ):
            self.wake()
            return
        self._pumping = threading.get_ident()
        try:
            if self._closed.is_set():
                return
            more = self._exchange()
            due = min(self._outbox.next_tick, self._session.next_tick())
        except BaseException as error:
            self._failure = error
            self._closed.set()  # as a failure in the link's own thread ends it
            self.wake()
            raise
        finally:
            self._pumping = 0
            self._using.release()
        if more or self._posted or due < self._sleeps_until:
            self.wake()

    def close(self, timeout: float, reason: str = "left") -> None:
        """Sends what is waiting, says goodbye and ends the thread.

        Args:
            timeout: Seconds until it ends whatever is still waiting.
            reason: What the others are told.
        """

        def leave() -> None:
            if not self._leaving:
                self._leaving = True
                self._leave_by = time.monotonic() + timeout
                self._reason = reason

        self._posted.append((leave, ()))
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout + 5.0)

    def abandon(self) -> None:
        """Ends the thread at once, without a goodbye."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # Everything from here on is for who holds ``_using``, or for the link's thread.

    def _run(self) -> None:
        try:
            with self._using:
                self._connect()
                self._do(self._session.start(time.monotonic()))
            while not self._closed.is_set():
                with self._using:
                    wanted = self._turn()
                self._sleep(wanted)
        except BaseException as error:
            _log.exception("the connection to the broker failed")
            self._failure = error
            raise
        finally:
            with self._using:
                self._closed.set()
                with self._room:
                    self._room.notify_all()
                if self._dealer is not None:
                    self._dealer.close()
                self._context.term()
                self._asleep = False  # a late wake() must not write to a file opened since
                os.close(self._wake_out)
                os.close(self._wake_in)
            if self._failure is not None:
                self._handlers.on_failed(self._failure)

    def _turn(self) -> float:
        """Does all there is to do and returns when there will be something again."""
        self._due = False
        self._look_after_connection()
        more = self._exchange()
        now = time.monotonic()
        if self._closed.is_set():
            return now
        self._reconnect_if_unanswered(now)
        wanted = self._handlers.on_tick(now)
        self._do(self._session.tick(now, self._handlers.stats))
        wanted = min(wanted, self._session.next_tick(), self._outbox.tick(now))
        if self._leaving:
            wanted = min(wanted, self._leave(now))
        self._flush()
        assert self._dealer is not None
        if more or self._posted or self._dealer.readable():
            return now
        return wanted

    def _sleep(self, until: float) -> None:
        """Waits for a message, a wake-up or a time."""
        # Lets threads go on that have more to post: as long as this one has not gone to
        # sleep, that costs them no system call, and what they post goes together.
        time.sleep(0)
        self._sleeps_until = until
        self._asleep = True
        if self._due or self._posted:  # by who saw that this thread was awake
            until = 0.0
        seconds = max(0.0, until - time.monotonic())
        ready = self._poller.poll(min(seconds, 60.0) * 1000 + 0.9)
        self._asleep = False
        self._sleeps_until = 0.0
        if any(descriptor == self._wake_out for descriptor, _ in ready):
            os.read(self._wake_out, 4096)

    def _exchange(self) -> bool:
        """Sends what was posted and handles what has come; returns whether there may be more."""
        self._run_posted()
        self._flush()
        more = self._receive()
        if self._waiting_for_room:
            with self._room:
                self._room.notify_all()
        self._run_posted()
        self._flush()
        return more

    def _run_posted(self) -> None:
        posted = self._posted
        while posted:
            action, args = posted.popleft()
            action(*args)

    def _receive(self) -> bool:
        dealer = self._dealer
        assert dealer is not None
        for _ in range(_ROUND):
            message = dealer.receive()
            if message is None:
                return False
            header, frames = message
            now = time.monotonic()
            try:
                decoded = wire.decode(header)
            except ProtocolError as error:
                _log.warning("dropped a message of the broker: %s", error)
                continue
            if isinstance(decoded, Route):
                self._session.heard(now)
                self._routed(decoded, frames, now)
            else:
                if isinstance(decoded, Heartbeat):
                    tracing.clock.heard(decoded.sent, now)
                self._do(self._session.receive(decoded, now))
            del message, frames  # an idle link must not keep the last payload alive
        return True

    def _routed(self, route: Route, frames: Sequence[Frame], now: float) -> None:
        verdict = self._outbox.receive(route, now)
        if verdict is Verdict.FORGOTTEN:
            self._leave_room(route.src)
            self._handlers.on_forgotten(route.src)
            verdict = self._outbox.receive(route, now)
        if verdict is not Verdict.HANDLE or route.kind == Kind.VOID:
            return
        try:
            if route.kind != Kind.BATCH:
                self._handlers.on_message(route, frames)
                return
            for kind, id, size, parts in batch.unpack(frames):
                self._handlers.on_message(Route(kind, route.dst, route.src, id, size), parts)
        except TensorPlayError as error:
            # One line for each peer, or a broken one would fill the disk.
            level = logging.DEBUG if route.src in self._complained else logging.WARNING
            self._complained.add(route.src)
            _log.log(level, "dropped a message of peer %d: %s", route.src, error)

    def _enter(self, dst: int, size: int) -> None:
        with self._room:
            self._entered[dst] = self._entered.get(dst, 0) + size

    def _drop(self, peer: int) -> None:
        self._outbox.drop(peer)
        self._leave_room(peer)

    def _leave_room(self, peer: int) -> None:
        """Forgets what was for a peer with which a new channel begins, if any."""
        self._complained.discard(peer)
        with self._room:
            self._entered.pop(peer, None)
            self._room.notify_all()

    def _consumed(self, src: int, size: int) -> None:
        self._outbox.consumed(src, size, time.monotonic())

    def _flush(self) -> None:
        """Sends while there is something that may go and the socket takes it."""
        dealer = self._dealer
        assert dealer is not None
        if self._stuck is not None:
            if not dealer.send(self._stuck):
                return
            self._stuck = None
        if self._session.state not in (State.REGISTERED, State.LEAVING):
            return
        now = time.monotonic()
        while (frames := self._outbox.take(now)) is not None:
            if not dealer.send(frames):
                self._stuck = frames
                return

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                # What is lost here (not connected, full) the session repeats in time.
                assert self._dealer is not None
                self._dealer.send((wire.encode(command.message),))
            elif isinstance(command, Registered):
                tracing.clock.restart()
                if command.again:
                    self._outbox.all_back(time.monotonic())
                self._handlers.on_registered(command.welcome, command.again)
            elif isinstance(command, PeersChanged):
                for peer in command.back:
                    self._outbox.back(peer.incarnation, time.monotonic())
                self._handlers.on_peers(command)
            elif isinstance(command, NotDelivered):
                self._not_delivered(command.report)
            elif isinstance(command, BrokerLost):
                self._handlers.on_broker_lost(command.silent_for)
            elif isinstance(command, Asked):
                self._handlers.on_asked(command.ask)
            elif isinstance(command, Answered):
                self._handlers.on_answered(command.answer)
            elif isinstance(command, Rejected):
                self._handlers.on_rejected(command.refused)
                self._closed.set()
            elif isinstance(command, Closed):
                self._closed.set()

    def _not_delivered(self, report: Undeliverable) -> None:
        if report.code == "full":
            self._outbox.full(report.dst, time.monotonic())
        elif report.code in ("away", "gone") and report.dst in self._session.peers:
            self._outbox.away(report.dst)  # it comes back, or the roster will tell
        else:
            if report.code == "too-large":
                self._outbox.void(report.dst, report.id)
            self._handlers.on_undeliverable(report)

    def _leave(self, now: float) -> float:
        """Leaves once everything is sent or the time is up; returns when to look again."""
        if self._session.state is State.REGISTERED:
            if (self._stuck is None and self._outbox.empty) or now >= self._leave_by:
                self._do(self._session.leave(self._reason))
                self._goodbye_by = now + _GOODBYE_SECONDS
        elif self._session.state is State.LEAVING:
            if now >= self._goodbye_by:  # the broker does not answer
                self._closed.set()
        else:
            self._closed.set()
        return now + 0.05

    # The connection.

    def _look_after_connection(self) -> None:
        assert self._dealer is not None
        for change in self._dealer.changes():
            if change is Change.CONNECTED:
                self._stuck = None  # what was not sent is asked for again
                self._do(self._session.connected(time.monotonic()))
            elif change is Change.KEY_REFUSED:
                refused = Refused(PROTOCOL_VERSION, "key", f"the broker at {self._address} {_NO}")
                self._do(self._session.receive(refused, time.monotonic()))
            elif change in (Change.FAILED, Change.UNLIKE):
                self._handshakes.failed()  # keeps trying
                if change is Change.UNLIKE:
                    self._connect_again_at = time.monotonic() + _AGAIN_SECONDS

    def _reconnect_if_unanswered(self, now: float) -> None:
        unanswered = (
            self._session.state is State.REGISTERING
            and now - self._connected_at > _RECONNECT_SECONDS
        )
        if unanswered or now >= self._connect_again_at:
            self._connect()

    def _connect(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
        self._stuck = None
        self._connected_at = time.monotonic()
        self._connect_again_at = math.inf
        session = self._session
        self._dealer = Dealer(
            self._context,
            self._address,
            session.heartbeat_interval,
            session.heartbeat_timeout,
            self._handshakes.keys,
        )
        self._poller = select.poll()
        for descriptor in (*self._dealer.descriptors(), self._wake_out):
            self._poller.register(descriptor, select.POLLIN)
