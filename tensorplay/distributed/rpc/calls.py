"""Calls in flight at the caller: a table of what is awaited, and what completes it."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tensorplay.distributed.rpc.future import Future
from tensorplay.protocol.messages import PeerInfo


@dataclass(frozen=True)
class Failed:
    """The outcome of a call that raised."""

    error: BaseException


#: Turns a raw reply into the value of the call, or into ``Failed``.
Decoder = Callable[["PendingCall", Any], Any]


class PendingCall:
    """One request that has not been answered.

    Its reply is decoded by the thread that waits for it, if one does, else by a thread of
    a pool: a synchronous call needs no further change of threads.

    Args:
        id: Number of the request.
        peer: The callee.
        what: Name of what was called, for messages.
        decode: Turns the raw reply into the value.
        state: What the caller's autograd wants back with the reply.
    """

    def __init__(
        self, id: int, peer: PeerInfo, what: str, decode: Decoder, state: Any = None
    ) -> None:
        self.id = id
        self.peer = peer
        self.what = what
        self.state = state
        self.exporter: object = None
        self.timeout = 0.0
        self.began = time.monotonic()
        self.future: Future[Any] = Future()
        self.future._complete = self.wait
        self._decode = decode
        self._lock = threading.Lock()
        self._raw: Any = None
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self._waiters = 0
        self._claimed = False
        self._settled = False

    def arrive(self, raw: Any, submit: Callable[..., None]) -> None:
        """Takes the raw reply; ``submit`` runs ``settle`` where nobody waits."""
        with self._lock:
            if self._settled:
                return
            self._settled = True
            self._raw = raw
            waited_for = self._waiters > 0
        self._arrived.release()
        if not waited_for:
            submit(self.settle)

    def fail(self, error: BaseException, submit: Callable[..., None]) -> None:
        """Ends the call with an exception of this side's own."""
        self.arrive(error, submit)

    def wait(self, timeout: float | None) -> None:
        """Waits until the call is complete or ``timeout`` seconds have passed."""
        with self._lock:
            self._waiters += 1
        arrived = False
        try:
            arrived = self._arrived.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:  # a KeyboardInterrupt must not leave a waiter behind that is not there
            with self._lock:
                self._waiters -= 1
        if arrived:
            self._arrived.release()  # for other waiters
            self.settle()

    def settle(self) -> None:
        """Decodes the reply and completes the future, in whichever thread comes first."""
        with self._lock:
            if self._claimed or not self._settled:
                return
            self._claimed = True
            raw, self._raw = self._raw, None
        # No reference from the future to its call may outlive the call: they form a cycle.
        self.future._complete = self.future._cancel = None
        self.exporter = None
        # Decoded even if cancelled: the references in it have been counted.
        outcome = Failed(raw) if isinstance(raw, BaseException) else self._decoded(raw)
        if self.future.cancelled():
            return
        if isinstance(outcome, Failed):
            _complete(self.future.set_exception, outcome.error)
        else:
            _complete(self.future.set_result, outcome)

    def _decoded(self, raw: Any) -> Any:
        try:
            return self._decode(self, raw)
        except BaseException as error:  # a reply that cannot be unpickled here
            traceback.clear_frames(error.__traceback__ and error.__traceback__.tb_next)
            return Failed(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def _complete(setter: Callable[[Any], None], value: Any) -> None:
    with suppress(RuntimeError):  # cancelled at the same moment
        setter(value)


@dataclass
class CallTable:
    """The calls in flight, and when each runs out of time."""

    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _calls: dict[int, PendingCall] = field(default_factory=dict)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drained: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._drained = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._calls)

    def next_id(self) -> int:
        """Returns the number of a new request."""
        return next(self._ids)

    def add(self, call: PendingCall, timeout: float = 0.0) -> None:
        """Enters a call before its request is sent; ``timeout`` 0 is no limit."""
        call.timeout = timeout
        with self._lock:
            self._calls[call.id] = call
            if timeout:
                heapq.heappush(self._deadlines, (time.monotonic() + timeout, call.id))

    def pop(self, id: int) -> PendingCall | None:
        """Removes and returns a call, or None if it has ended already."""
        with self._lock:
            call = self._calls.pop(id, None)
            if not self._calls:
                self._deadlines.clear()
                self._drained.notify_all()
            return call

    def pop_if_to(self, id: int, incarnation: int) -> PendingCall | None:
        """Removes and returns a call if it is one to that peer."""
        with self._lock:
            call = self._calls.get(id)
        return self.pop(id) if call is not None and call.peer.incarnation == incarnation else None

    def expired(self, now: float) -> list[PendingCall]:
        """Removes and returns the calls whose time is up."""
        late = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, id = heapq.heappop(self._deadlines)
                call = self._calls.pop(id, None)
                if call is not None:
                    late.append(call)
            if not self._calls:
                self._drained.notify_all()
        return late

    def next_deadline(self) -> float:
        """Returns when the next call runs out of time; infinity if none does."""
        with self._lock:
            while self._deadlines and self._deadlines[0][1] not in self._calls:
                heapq.heappop(self._deadlines)
            return self._deadlines[0][0] if self._deadlines else float("inf")

    def to(self, incarnation: int | None) -> list[PendingCall]:
        """Removes and returns the calls to one peer, or all of them."""
        with self._lock:
            ids = [
                id
                for id, call in self._calls.items()
                if incarnation is None or call.peer.incarnation == incarnation
            ]
            calls = [self._calls.pop(id) for id in ids]
            if not self._calls:
                self._drained.notify_all()
        return calls

    def wait_empty(self, timeout: float | None) -> bool:
        """Waits until no call is in flight; returns whether that came about."""
        with self._drained:
            return self._drained.wait_for(lambda: not self._calls, timeout)
