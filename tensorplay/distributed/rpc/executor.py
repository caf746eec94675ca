"""The thread pool that runs the calls of others.

The pool has a number of threads that run at a time, not a number of threads: one that
waits for a further call (``blocked``) is replaced until it goes on.  Calls nested to any
depth, here and over any number of processes, therefore never deadlock for want of a
thread.  Waits that the pool is not told of, such as for a lock or a foreign future, are
found by ``relieve``: a thread that has used no processor time since the last look, while
work is queued, counts as waiting.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_log = logging.getLogger(__name__)

_Task = tuple[Callable[..., object], tuple[Any, ...]]

#: Seconds for which an idle thread is kept.
IDLE_SECONDS = 10.0

_current = threading.local()


class Executor:
    """A pool of daemon threads that grows while its threads wait.

    Args:
        threads: How many tasks run at a time.
        name: Prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._limit = threads
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._threads: set[threading.Thread] = set()
        self._blocked = 0
        self._relief = 0  # threads added because others wait unseen
        self._started = 0
        self._closed = False
        self._busy: dict[int, float] = {}  # thread ident -> processor seconds at last look

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Runs ``function(*args)`` on a thread of the pool; what it raises is logged."""
        self._tasks.put((function, args))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                self._grow()

    @property
    def backlog(self) -> int:
        """Tasks that no thread has taken yet."""
        return self._tasks.qsize()

    @property
    def size(self) -> int:
        """Threads alive."""
        return len(self._threads)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Within it the calling thread counts as waiting, so that another may run."""
        with self._lock:
            self._blocked += 1
            if not self._tasks.empty():
                self._grow()
        try:
            yield
        finally:
            with self._lock:
                self._blocked -= 1

    def relieve(self) -> None:
        """Adds threads if work is queued while every thread waits for something."""
        if self._tasks.empty():
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
                    self._spawn()

    def close(self, timeout: float = 1.0) -> None:
        """Ends the threads once the queue is empty, waiting at most ``timeout`` seconds."""
        self._closed = True
        threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _running(self) -> int:
        return len(self._threads) - self._blocked - self._relief

    def _grow(self) -> None:
        if self._running() < self._limit:
            self._spawn()

    def _spawn(self) -> None:
        if self._closed:
            return
        self._started += 1
        thread = threading.Thread(
            target=self._run, name=f"{self._name}-{self._started}", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        _current.executor = self
        try:
            while (task := self._next()) is not None:
                function, args = task
                try:
                    function(*args)
                except BaseException:  # a task answers for itself; the pool must live on
                    _log.exception("a task of the pool %s failed", self._name)
                # A finished task must not live on in the frame of an idle thread.
                del task, function, args
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self) -> _Task | None:
        """Returns the next task, or None if the calling thread is to end."""
        if self._surplus():
            return None
        try:
            return self._tasks.get_nowait()
        except queue.Empty:
            self._idle.release()
        try:
            return self._tasks.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            # Whoever takes the token has the last word: a submitter counts on this thread.
            if self._idle.acquire(blocking=False):
                return None
            return self._tasks.get()

    def _surplus(self) -> bool:
        """Whether threads that waited are running again and make one too many."""
        with self._lock:
            if self._running() > self._limit:
                self._threads.discard(threading.current_thread())
                return True
            return False


@contextmanager
def blocked() -> Iterator[None]:
    """Within it the calling thread, if it belongs to a pool, counts as waiting there."""
    executor: Executor | None = getattr(_current, "executor", None)
    if executor is None:
        yield
        return
    with executor.blocked():
        yield


def _processor_seconds(ident: int) -> float:
    """Returns the processor time that a thread has used, or -1 where it cannot be read."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except (AttributeError, OSError):
        return -1.0
