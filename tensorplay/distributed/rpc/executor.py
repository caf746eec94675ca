"""The thread pool that runs the calls of others.

To hand a task to another thread costs more than many tasks do.  So a task that comes
while a thread is at work wakes no other: the thread takes it when it is done with its
own.  Another idle thread then keeps *watch* and joins in once the tasks at work turn out
to be long - they compute, sleep, or wait for a task that is queued behind them.

The pool has a number of threads that run at a time, not a number of threads: one that
waits for a further call (``blocked``) is replaced until it goes on.  Calls nested to any
depth, here and over any number of processes, therefore never deadlock for want of a
thread.  Waits that the pool is not told of, such as for a lock or a foreign future, are
found by ``relieve``: a thread that has used no processor time since the last look, while
work is queued, counts as waiting.

Single operations of a deque are atomic: ``submit`` appends a task, then looks whether a
thread is at work; a thread says that it is not, then looks for tasks.  One of the two
sees the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

_log = logging.getLogger(__name__)

_Task = tuple[Callable[..., object], tuple[Any, ...]]

#: Seconds for which an idle thread is kept.
IDLE_SECONDS = 10.0
#: Seconds after which a watching thread looks at the queue, at first and from then on.
FIRST_LOOK_SECONDS = 0.0002
LOOK_SECONDS = 0.001
#: Seconds between two looks for threads that wait unseen.
RELIEF_SECONDS = 0.1
#: Tasks that take less than this, on average, are not worth a further thread.
SHORT_SECONDS = 0.0001

_current = threading.local()


class _Seat:
    """Where an idle thread waits to be called.

    Attributes:
        call: Released to call the thread.
        watching: Whether it is called to keep watch, not to run tasks.
    """

    __slots__ = ("call", "watching")

    def __init__(self, watching: bool) -> None:
        self.call = threading.Lock()
        self.call.acquire()
        self.watching = watching


class Executor:
    """A pool of daemon threads that grows while its threads wait.

    Args:
        threads: How many tasks run at a time.
        name: Prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._limit = threads
        self._name = name
        self._tasks: deque[_Task] = deque()
        self._lock = threading.Lock()
        self._idle: list[_Seat] = []  # the one that was last at work is at the end
        self._threads: set[threading.Thread] = set()
        self._running = 0  # threads at work or about to be, but for those that wait
        self._watched = False  # by a thread that keeps watch
        self._blocked = 0
        self._relief = 0  # threads added because others wait unseen
        self._started = 0
        self._taken = 0  # tasks
        self._closed = False
        self._busy: dict[int, float] = {}  # thread ident -> processor seconds at last look

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Runs ``function(*args)`` on a thread of the pool; what it raises is logged."""
        self._tasks.append((function, args))
        if not self._running or not self._watched:
            self._attend()

    @property
    def backlog(self) -> int:
        """Tasks that no thread has taken yet."""
        return len(self._tasks)

    @property
    def size(self) -> int:
        """Threads alive."""
        return len(self._threads)

    def enter_wait(self) -> None:
        """Notes that the calling thread waits from now on, so that another may run."""
        with self._lock:
            self._blocked += 1
            self._running -= 1
            if self._tasks:
                self._grow()

    def leave_wait(self) -> None:
        """Notes that the calling thread goes on."""
        with self._lock:
            self._blocked -= 1
            self._running += 1

    def relieve(self) -> None:
        """Adds threads if work is queued while every thread waits for something."""
        if not self._tasks:
            self._busy.clear()
            self._relief = 0
            return
        with self._lock:
            seen = {
                thread.ident: _processor_seconds(thread.ident)
                for thread in self._threads
                if thread.ident is not None
            }
            stuck = all(self._busy.get(ident) == spent for ident, spent in seen.items())
            self._busy = seen
            if stuck and seen:
                more = max(1, self._relief)
                self._relief += more
                for _ in range(more):
                    self._grow()

    def close(self, timeout: float = 1.0) -> None:
        """Ends the threads once the queue is empty, waiting at most ``timeout`` seconds."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            while self._idle:
                self._running += 1
                self._call(watching=False)
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    # Down to ``_attend`` with ``_lock`` held.

    @property
    def _full(self) -> bool:
        return self._running >= self._limit + self._relief

    def _grow(self) -> None:
        """Has one more thread run, if it may."""
        if not self._full and self._call(watching=False):
            self._running += 1

    def _watch(self) -> None:
        """Has a thread keep watch, unless no more may run anyway."""
        if not self._full:
            self._watched = self._call(watching=True)

    def _call(self, *, watching: bool) -> bool:
        """Calls an idle thread or starts one; returns whether that was possible."""
        if self._idle:
            seat = self._idle.pop()
            seat.watching = watching
            seat.call.release()
        elif self._closed:
            return False
        else:
            self._started += 1
            thread = threading.Thread(
                target=self._run,
                args=(_Seat(watching),),
                name=f"{self._name}-{self._started}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter is at its end
                return False
            self._threads.add(thread)
        return True

    # From here on without it.

    def _attend(self) -> None:
        """Sees to it that queued tasks are not forgotten."""
        with self._lock:
            if not self._tasks:
                return
            if not self._running:
                self._grow()
            elif not self._watched:
                self._watch()

    def _run(self, seat: _Seat) -> None:
        _current.executor = self
        try:
            while True:
                runs = not seat.watching or self._keep_watch()
                if runs:
                    self._work()
                if not self._rest(seat, runs):
                    return
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _work(self) -> None:
        """Runs tasks until there are none, or until the calling thread is one too many."""
        tasks = self._tasks
        while self._running <= self._limit + self._relief:
            try:
                function, args = tasks.popleft()
            except IndexError:
                return
            self._taken += 1
            if tasks and not self._watched:
                self._attend()
            try:
                function(*args)
            except BaseException:  # a task answers for itself; the pool must live on
                _log.exception("a task of the pool %s failed", self._name)
            # A finished task must not live on in the frame of an idle thread.
            del function, args

    def _keep_watch(self) -> bool:
        """Watches the tasks at work; returns whether the calling thread is to run some, too."""
        seconds = FIRST_LOOK_SECONDS
        while True:
            taken, since = self._taken, time.monotonic()
            time.sleep(seconds)
            seconds = LOOK_SECONDS
            with self._lock:
                self._watched = False
                if not self._tasks or self._full:
                    return False
                taken = self._taken - taken
                spent = (time.monotonic() - since) * self._running
                if spent <= taken * SHORT_SECONDS:
                    self._watched = True
                    continue
                more = 0 if taken else min(self._running, len(self._tasks)) - 1
                self._running += 1
                for _ in range(more):  # they take long, or wait for those that are queued
                    self._grow()
                return True

    def _rest(self, seat: _Seat, ran: bool) -> bool:
        """Waits to be called; returns False if the calling thread is to end."""
        seat.watching = False
        with self._lock:
            if ran:
                self._running -= 1
            if self._tasks and not self._full:
                self._running += 1
                return True
            surplus = len(self._threads) - self._blocked - self._relief > self._limit
            if surplus or self._closed:
                self._threads.discard(threading.current_thread())
                return False
            self._idle.append(seat)
        if seat.call.acquire(timeout=IDLE_SECONDS):
            return True
        with self._lock:
            if seat in self._idle:
                self._idle.remove(seat)
                self._threads.discard(threading.current_thread())
                return False
        return seat.call.acquire()  # it has been called just now


class _Blocked:
    """The context manager that ``blocked`` returns."""

    __slots__ = ("_executor",)

    def __enter__(self) -> None:
        self._executor: Executor | None = getattr(_current, "executor", None)
        if self._executor is not None:
            self._executor.enter_wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            self._executor.leave_wait()


def blocked() -> _Blocked:
    """Within it the calling thread, if it belongs to a pool, counts as waiting there."""
    return _Blocked()


class Relief:
    """Has pools look now and then whether their threads all wait unseen.

    Args:
        pools: The pools.
    """

    def __init__(self, *pools: Executor) -> None:
        self._pools = pools
        self._next_look = 0.0

    def tick(self, now: float) -> float:
        """Does what is due and returns when there is something to do again."""
        if not any(pool.backlog for pool in self._pools):
            return float("inf")
        if now >= self._next_look:
            for pool in self._pools:
                pool.relieve()
            self._next_look = now + RELIEF_SECONDS
        return self._next_look


def _processor_seconds(ident: int) -> float:
    """Returns the processor time that a thread has used, or -1 where it cannot be read."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except (AttributeError, OSError):
        return -1.0
