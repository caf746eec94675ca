"""Calls in flight at the caller: a table of what is awaited, and what completes it.

Single operations of a dict or list are atomic: whoever removes a call from the table ends
it, and whoever takes the reply out of its box decodes it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.tracing import Trace
from tensorplay.protocol.messages import PeerInfo


@dataclass(frozen=True)
class Failed:
    """The outcome of a call that raised."""

    error: BaseException


#: Turns a raw reply into the value of the call, or into ``Failed``.
Decoder = Callable[["PendingCall", Any], Any]
_NOTHING: list[Any] = []  # stays empty
#: Deadlines of calls that have ended are cleared away when there are more of them.
_MOST_STALE = 1024


class PendingCall:
    """One request that has not been answered.

    Its reply is decoded by the thread that waits for it, if one does, else by a thread of
    a pool: a synchronous call needs no further change of threads.

    Args:
        id: Number of the request.
        peer: The callee.
        function: What was called.
        decode: Turns the raw reply into the value.
        give_up: Removes the call and tells the callee.

    Attributes:
        meta: What the caller's autograd tells the callee's.
        state: What it wants back with the reply.
        began: When it was made, by this process's clock.
        kept: Lives until the reply has come.
        timeout: Seconds that the call may take, 0 for no limit.
        future: The future of the result.
        trace: Where its times are noted, if it is traced.
    """

    __slots__ = (
        "_arrived",
        "_box",
        "_decode",
        "_give_up",
        "_waiter",
        "began",
        "function",
        "future",
        "id",
        "kept",
        "meta",
        "peer",
        "state",
        "timeout",
        "trace",
    )

    def __init__(
        self,
        id: int,
        peer: PeerInfo,
        function: Any,
        decode: Decoder,
        give_up: Callable[[PendingCall], None],
    ) -> None:
        self.id = id
        self.peer = peer
        self.function = function
        self.meta = b""
        self.state: Any = None
        self.kept: object = None
        self.timeout = 0.0
        self.trace: Trace | None = None
        self.began = time.monotonic()
        self.future: Future[Any] = Future()
        self.future._call = self
        self._decode = decode
        self._give_up = give_up
        self._box: list[Any] = _NOTHING  # the raw reply, until somebody decodes it
        self._arrived = False
        self._waiter: threading.Lock | None = None  # released when the reply comes

    @property
    def what(self) -> str:
        """Name of what was called, for messages."""
        function = self.function
        if function is None:
            return "to_here()"
        name = getattr(function, "__qualname__", None) or getattr(function, "name", function)
        return str(name)

    def arrive(self, raw: Any, submit: Callable[..., None]) -> None:
        """Takes the raw reply, once; ``submit`` runs ``settle`` where nobody waits."""
        self._box = [raw]
        self._arrived = True
        # Whoever waits says so before it looks whether the reply has arrived.
        waiter = self._waiter
        if waiter is None:
            submit(self.settle)
        else:
            waiter.release()

    def wait(self, timeout: float | None) -> None:
        """Waits until the call is complete or ``timeout`` seconds have passed."""
        waiter = self._waiter
        if waiter is None:
            with _making_waiter:
                waiter = self._waiter
                if waiter is None:
                    waiter = threading.Lock()
                    waiter.acquire()
                    self._waiter = waiter
        if not self._arrived:
            if not waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                return
            waiter.release()  # for other waiters
        self.settle()

    def settle(self) -> bool:
        """Decodes the reply and completes the future, in whichever thread comes first.

        Returns:
            Whether it was this one.
        """
        try:
            raw = self._box.pop()
        except IndexError:
            return False
        future = self.future
        # Decoded even if cancelled: the references in it have been counted.
        outcome = Failed(raw) if isinstance(raw, BaseException) else self._decoded(raw)
        # No reference from the future to its call may outlive the call: they form a cycle.
        future._call = self.kept = None
        if future._cancelled:
            return True
        try:
            if isinstance(outcome, Failed):
                future.set_exception(outcome.error)
            else:
                _set_result(future, outcome)
        except RuntimeError:  # cancelled at the same moment
            if not future._cancelled:
                raise
        return True

    @property
    def number(self) -> tuple[int, int]:
        """Incarnation of the callee, and the request's number."""
        return self.peer.incarnation, self.id

    def cancel(self) -> None:
        """Gives the call up: no reply to it is wanted any more."""
        self._give_up(self)

    def _decoded(self, raw: Any) -> Any:
        try:
            return self._decode(self, raw)
        except BaseException as error:  # a reply that cannot be unpickled here
            traceback.clear_frames(error.__traceback__ and error.__traceback__.tb_next)
            return Failed(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


_making_waiter = threading.Lock()
_set_result = torch._C.Future.set_result


class CallTable:
    """The calls in flight, and when each runs out of time."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; some are of calls that have ended
        self._lock = threading.Lock()  # of the heap
        self._drained = threading.Condition()
        self._draining = 0  # threads that wait until there is no call

    def __len__(self) -> int:
        return len(self._calls)

    def next_id(self) -> int:
        """Returns the number of a new request."""
        return next(self._ids)

    def add(self, call: PendingCall, timeout: float = 0.0) -> None:
        """Enters a call before its request is sent; ``timeout`` 0 is no limit."""
        call.timeout = timeout
        self._calls[call.id] = call
        if timeout:
            with self._lock:
                deadlines = self._deadlines
                heapq.heappush(deadlines, (time.monotonic() + timeout, call.id))
                if len(deadlines) > 2 * len(self._calls) + _MOST_STALE:
                    self._deadlines = [entry for entry in deadlines if entry[1] in self._calls]
                    heapq.heapify(self._deadlines)

    def pop(self, id: int) -> PendingCall | None:
        """Removes and returns a call, or None if it has ended already."""
        call = self._calls.pop(id, None)
        if self._draining:
            self._notify_drained()
        return call

    def pop_if_to(self, id: int, incarnation: int) -> PendingCall | None:
        """Removes and returns a call if it is one to that peer."""
        call = self._calls.get(id)
        return self.pop(id) if call is not None and call.peer.incarnation == incarnation else None

    def expired(self, now: float) -> list[PendingCall]:
        """Removes and returns the calls whose time is up."""
        ids = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                ids.append(heapq.heappop(self._deadlines)[1])
        return [call for id in ids if (call := self.pop(id)) is not None]

    def next_deadline(self) -> float:
        """Returns when the next call runs out of time; infinity if none does."""
        with self._lock:
            while self._deadlines and self._deadlines[0][1] not in self._calls:
                heapq.heappop(self._deadlines)
            return self._deadlines[0][0] if self._deadlines else float("inf")

    def to(self, incarnation: int | None) -> list[PendingCall]:
        """Removes and returns the calls to one peer, or all of them."""
        ids = [
            call.id
            for call in list(self._calls.values())
            if incarnation is None or call.peer.incarnation == incarnation
        ]
        return [call for id in ids if (call := self.pop(id)) is not None]

    def wait_empty(self, timeout: float | None) -> bool:
        """Waits until no call is in flight; returns whether that came about."""
        with self._drained:
            self._draining += 1
            try:
                return self._drained.wait_for(lambda: not self._calls, timeout)
            finally:
                self._draining -= 1

    def _notify_drained(self) -> None:
        if not self._calls:
            with self._drained:
                self._drained.notify_all()
