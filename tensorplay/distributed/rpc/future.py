"""Futures: torch's own, with a time-out, cancellation and ``await``."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

import torch

from tensorplay.distributed.rpc.executor import blocked
from tensorplay.errors import CallbackError, RemoteError, RpcTimeoutError

T = TypeVar("T")
S = TypeVar("S")

_log = logging.getLogger(__name__)

_cancelling = threading.Lock()
_wait = torch._C.Future.wait


class Call(Protocol):
    """What completes a future, as the future sees it."""

    def settle(self) -> bool:
        """Completes the future if the result is there; returns whether this call did so."""

    def wait(self, timeout: float | None) -> None:
        """Waits until the future is complete or ``timeout`` seconds have passed."""

    def cancel(self) -> None:
        """Gives the call up."""

    @property
    def number(self) -> tuple[int, int]:
        """Incarnation of the callee, and the request's number."""


class Future(torch.futures.Future[T], Generic[T]):
    """A ``torch.futures.Future`` that can be awaited, cancelled, and waited for with a limit.

    An exception that nobody retrieves is logged when the future is dropped.
    """

    # Set on the class, as most of them stay as they are in most futures.
    _retrieved = False
    _failure: BaseException | None = None
    _cancelled = False
    _recorded: Any = None  # what autograd keeps of a call that made a reference
    _call: Call | None = None  # whose result this will be, until it is

    def __init__(self) -> None:
        torch._C.Future.__init__(self, [])  # what torch's own does, in half the time

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the result is there and returns it.

        Args:
            timeout: Seconds to wait at most; None is no limit. The call goes on.

        Raises:
            RpcTimeoutError: If the time is up. Whatever the call raised otherwise.
        """
        self._retrieved = True
        call = self._call
        if not ((call is not None and call.settle()) or self.done()):
            with blocked():
                self._wait_until_done(timeout)
        result: T = _wait(self)  # another thread may still be decoding the result
        return result

    def value(self) -> T:
        """Returns the result of a completed future.

        Raises:
            RuntimeError: If it is not completed. Whatever the call raised otherwise.
        """
        self._retrieved = True
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Returns a future of ``callback(self)``, which runs when this one is done.

        Args:
            callback: Takes the completed future. What it raises fails the new future with
                a ``CallbackError``.

        Raises:
            TypeError: If ``callback`` cannot be called.
        """
        if not callable(callback):
            raise TypeError(
                f"then(): incompatible function arguments. Expected a callable, got {callback!r}"
            )

        def wrap(error: BaseException) -> BaseException:
            failure = CallbackError(
                "Got the following error when running the callback: "
                f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            return failure

        return self._then(callback, wrap)

    def _then(
        self,
        callback: Callable[[Future[T]], S],
        wrap: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> Future[S]:
        """Does what ``then`` does; what the callback raises fails the new future as it is."""
        following: Future[S] = Future()

        def run(done: torch.futures.Future[T]) -> None:
            try:
                result = callback(self)
            except BaseException as error:
                following.set_exception(wrap(error))
            else:
                following.set_result(result)

        self._retrieved = True
        super().add_done_callback(run)
        return following

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Runs ``callback(self)`` when the future is done; what it raises is logged."""
        self._retrieved = True

        def run(done: torch.futures.Future[T]) -> None:
            try:
                callback(self)
            except BaseException:
                _log.exception("a done callback of a future failed")

        super().add_done_callback(run)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Completes the future with an exception, which ``wait`` then raises."""
        if not isinstance(result, BaseException):
            raise TypeError(f"{result!r} is of type {type(result).__name__}, not an Exception.")
        self._failure = result
        me = weakref.ref(self)

        def unwrap(stand_in: BaseException) -> None:
            future = me()
            _raise(stand_in if future is None or future._failure is None else future._failure)

        # The garbage collector does not see what libtorch holds, and the frames of the
        # traceback, with all their callers, may well hold the future: it gets a copy without.
        self._set_unwrap_func(unwrap)
        super().set_result(_stand_in(result))  # type: ignore[arg-type]

    def exception(self) -> BaseException | None:
        """Returns the exception of a completed future, or None."""
        self._retrieved = True
        return self._failure

    def cancel(self) -> bool:
        """Gives up the call: its result is not wanted any more.

        The callee drops it if it has not begun; a running one goes on, its result is
        discarded. ``wait`` then raises ``asyncio.CancelledError``'s sibling of the standard
        library, ``concurrent.futures.CancelledError``.

        Returns:
            Whether the future was still pending.
        """
        from concurrent.futures import CancelledError

        with _cancelling:
            if self.done():
                return False
            self._cancelled = True
        if (call := self._call) is not None:
            call.cancel()
        self._retrieved = True
        try:
            self.set_exception(CancelledError("the call was cancelled by its caller"))
        except RuntimeError:  # completed in the meantime
            self._cancelled = False
            return False
        return True

    def cancelled(self) -> bool:
        """Returns whether ``cancel`` ended the future."""
        return self._cancelled

    def __await__(self) -> Generator[Any, None, T]:
        """Waits in the running event loop without blocking it."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def done(future: torch.futures.Future[T]) -> None:
            loop.call_soon_threadsafe(wake)

        self.add_done_callback(done)
        try:
            yield from waiter.__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.wait()

    def __del__(self) -> None:
        failure = getattr(self, "_failure", None)
        if failure is not None and not self._retrieved:
            _log.error(
                "a call failed and nobody asked for its result: %s: %s",
                type(failure).__name__,
                failure,
            )

    def _wait_until_done(self, timeout: float | None) -> None:
        call = self._call
        if call is not None:
            call.wait(timeout)
        if timeout is None or self.done():
            return
        event = threading.Event()
        super().add_done_callback(lambda _: event.set())
        if not event.wait(timeout):
            raise RpcTimeoutError(f"no result within the {timeout} s that wait() was given")


def _copy(error: BaseException) -> BaseException | None:
    """Returns a copy without traceback, or None if there can be none."""
    try:
        fresh = copy.copy(error)
    except Exception:  # an exception with a constructor of its own
        return None
    if fresh is error or type(fresh) is not type(error):
        return None
    fresh.__cause__ = error.__cause__
    fresh.__suppress_context__ = error.__suppress_context__
    return fresh.with_traceback(None)


def _stand_in(error: BaseException) -> BaseException:
    """Returns what is raised in place of an exception when only libtorch has the future."""
    fresh = _copy(error)
    if fresh is not None:
        fresh.__cause__ = None
        return fresh
    name = type(error).__qualname__
    return RemoteError(f"{name}: {error}", remote_type=name, remote_message=str(error))


def _raise(error: BaseException) -> None:
    """Raises a copy: each raise adds to a traceback, and must not do so for all who wait."""
    fresh = _copy(error) or error
    fresh.__context__ = error.__context__
    try:
        raise fresh.with_traceback(error.__traceback__)
    finally:
        del fresh, error  # this frame is in the traceback of what it would hold
