"""The public functions: calling, remote objects, who is there, shutting down."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from tensorplay.distributed.rpc import collective, current, ending, internal, script
from tensorplay.distributed.rpc.agent import Agent
from tensorplay.distributed.rpc.constants import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    FIRST_CALL_FACTOR,
    UNSET_RPC_TIMEOUT,
)
from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.options import WorkerInfo
from tensorplay.distributed.rpc.rref import RRef
from tensorplay.errors import ConfigError, WorkerLostError, WorkerNotFoundError
from tensorplay.protocol.messages import PeerInfo

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Target: TypeAlias = str | int | WorkerInfo

__all__ = [
    "RRef",
    "get_rpc_timeout",
    "get_worker_info",
    "list_workers",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_for_workers",
]

#: Holds ``future_list`` while a thread is inside ``_wait_all``.
_thread_local_var = threading.local()

#: Whether ``shutdown`` keeps quiet about references that were not dropped.
_ignore_rref_leak = True

#: Turns what is called and returned into bytes; ``_use_rpc_pickler`` replaces it.
_default_pickler: Any = internal._internal_rpc_pickler


def _require_initialized(function: Callable[P, T]) -> Callable[P, T]:
    """Has ``function`` raise ``NotInitializedError`` where there is no agent."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        current.agent()
        return function(*args, **kwargs)

    return wrapper


def _get_current_rpc_agent() -> Agent:
    return current.agent()


def _is_current_rpc_agent_set() -> bool:
    return current.is_set()


def rpc_sync(
    to: Target,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_RPC_TIMEOUT,
) -> T:
    """Runs ``func`` on a worker and returns its result.

    Args:
        to: Name, rank or WorkerInfo of the callee.
        func: What it runs; a decorated ``functions.async_execution`` answers later.
        args: Positional arguments; tensors arrive with the values they have now.
        kwargs: Keyword arguments.
        timeout: Seconds, 0 or None for no limit; by default the agent's.

    Returns:
        What the function returned. Gradients flow through it back to the arguments and to
        the parameters used on the worker, if grad mode is on.

    Raises:
        NotInitializedError: If this process has no agent.
        WorkerNotFoundError: If there is no such worker.
        WorkerLostError: If it dies before it answers.
        RpcTimeoutError: If it does not answer in time.
        SerializationError: If an argument cannot travel.
        Exception: Whatever the function raised, as its own type where that can be rebuilt,
            else ``RemoteError``.
    """
    result: T = _result(_invoke(to, func, args, kwargs, timeout))
    return result


def _result(future: Future[T]) -> T:
    """Waits for a call of which nobody else has the future."""
    try:
        result: T = future.wait()
    except (KeyboardInterrupt, SystemExit):
        future.cancel()  # if it was this process that was interrupted
        raise
    return result


def rpc_async(
    to: Target,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """Runs ``func`` on a worker and returns the future of its result.

    Args and errors are those of ``rpc_sync``; what concerns the call itself is raised by
    the future's ``wait``.
    """
    return _collected(_invoke(to, func, args, kwargs, timeout))


def _call_owner(
    rref: RRef[Any],
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    hooks: bool = True,
    first: bool = False,
) -> Future[T]:
    """Runs ``func(rref, *args, **kwargs)`` at the owner of an object, never at its successor.

    Args:
        rref: Refers to the object.
        func: What it runs.
        args: Its further positional arguments.
        kwargs: Its keyword arguments.
        hooks: Whether autograd takes notice.
        first: Whether it may take longer, as much has to be made ready.

    Raises:
        OwnerLostError: If the owner is gone.
    """
    owner = rref._live_owner(f"{getattr(func, '__name__', func)}()")
    agent = rref._context.agent
    timeout = FIRST_CALL_FACTOR * agent.rpc_timeout if first else UNSET_RPC_TIMEOUT
    if rref.is_owner():
        args = (rref, *args)
        return _collected(agent.call(owner, func, args, kwargs, timeout=timeout, hooks=hooks))
    return _collected(
        agent.call(owner, func, args, kwargs, timeout=timeout, hooks=hooks, subject=rref)
    )


def _progress(future: Future[Any]) -> tuple[int, int]:
    """Returns how many bytes of a call's large payload have passed, and of how many.

    Those of the reply once it comes; 0 of 0 where nothing large is under way.
    """
    call, agent = future._call, current.agent()
    return (0, 0) if call is None or agent is None else agent.progress(*call.number)


def remote(
    to: Target,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Runs ``func`` on a worker, leaves the result there, and returns a reference to it.

    Returns at once. What the function raises is raised when the reference is used.

    Args:
        to: Name, rank or WorkerInfo of the worker that will own the result.
        func: What it runs.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds within which the owner must have confirmed; 0 for no limit.
    """
    agent = current.agent()
    _check_callable(func, args, kwargs)
    return RRef._create_remote(
        agent, agent.callee(to), func, tuple(args or ()), dict(kwargs or {}), timeout
    )


def get_worker_info(worker_name: Target | None = None) -> WorkerInfo:
    """Returns name and id of a worker, by default of this process.

    Raises:
        WorkerNotFoundError: If there is no such worker.
    """
    return current.agent().get_worker_info(worker_name)


def list_workers() -> list[PeerInfo]:
    """Returns every live peer of the namespace: name, id, role, host, pid, device, versions."""
    return current.agent().roster.all()


def wait_for_workers(names: Iterable[Target], timeout: float | None = None) -> list[WorkerInfo]:
    """Waits until all the named workers are there.

    Args:
        names: Names, ranks or WorkerInfos.
        timeout: Seconds to wait at most; None is no limit.

    Raises:
        WorkerNotFoundError: If the time is up; the text says who is missing.
    """
    agent, wanted = current.agent(), list(names)

    def missing() -> list[Target]:
        return [name for name in wanted if not _is_there(agent, name)]

    if not agent.roster.wait_for(lambda: not missing(), timeout):
        raise WorkerNotFoundError(
            f"{missing()} did not come within {timeout} s; registered are {agent.roster.describe()}"
        )
    return [agent.get_worker_info(name) for name in wanted]


def get_rpc_timeout() -> float:
    """Returns the default time-out of calls in seconds; 0 is no limit."""
    return current.agent().rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    """Sets the default time-out of calls in seconds; 0 is no limit."""
    if not seconds >= 0:
        raise ConfigError(f"a time-out is 0 (no limit) or more seconds, got {seconds}")
    current.agent().rpc_timeout = float(seconds)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the broker and ends this process's agent.

    A process of a fixed world waits until all of them have called this; one that joined
    elastically waits for its own calls and leaves. A peer that died is not waited for.

    Args:
        graceful: Whether to wait at all.
        timeout: Seconds to wait at most; 0 is no limit.

    Raises:
        NotInitializedError: If this process has no agent.
        RpcTimeoutError: If the others of a fixed world did not come in time; the agent has
            ended all the same.
    """
    agent = current.agent()
    limit = ending.drain_limit(timeout or None)
    try:
        if graceful:
            if agent.world_size is not None:
                _wait_all_workers(limit or DEFAULT_SHUTDOWN_TIMEOUT)
            else:  # what runs here may still use the references that this process holds
                agent.drain(limit)
            _delete_all_user_and_unforked_owner_rrefs()
            agent.drain(limit)
    finally:
        agent.close(reason="left")
        current.set_agent(None)
        _stop_embedded_broker()


def _stop_embedded_broker() -> None:
    from tensorplay.distributed.rpc import rendezvous

    rendezvous.stop_embedded_broker()


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Lets go of every reference that this process holds."""
    agent = current.agent()
    agent.rrefs.release_all()
    agent.flush_refs()


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Waits until every process of a fixed world has called this."""
    try:
        _all_gather(None, timeout=timeout)
    except (WorkerLostError, WorkerNotFoundError) as error:
        _log.warning("not waiting for the others to shut down: %s", error)


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Returns what each member of the world gave; see ``collective.all_gather``."""
    return collective.all_gather(current.agent(), obj, worker_names, timeout)


def _barrier(worker_names: Iterable[str]) -> None:
    """Waits until all the named workers have called this."""
    try:
        _all_gather(None, worker_names)
    except RuntimeError:
        _log.exception("Failed to complete barrier")


@contextmanager
def _wait_all() -> Iterator[None]:
    """Waits at its end for every future that ``rpc_async`` returned within it."""
    current.agent()
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Has calls of this process use another pickler within it.

    Args:
        rpc_pickler: Has ``serialize(obj) -> (bytes, tensors)`` and
            ``deserialize(bytes, tensors)``; the other processes must use the same.
    """
    global _default_pickler
    _default_pickler = rpc_pickler
    internal.use_pickler(rpc_pickler)
    try:
        yield
    finally:
        _default_pickler = internal._internal_rpc_pickler
        internal.use_pickler(_default_pickler)


def _collected(future: Future[T]) -> Future[T]:
    """Enters a future where the surrounding ``_wait_all`` waits for it."""
    futures: list[Future[Any]] | None = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


def _invoke(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float | None,
) -> Future[Any]:
    agent = current.agent()
    _check_callable(func, args, kwargs)
    return agent.call(
        agent.callee(to), func, tuple(args or ()), dict(kwargs or {}), timeout=timeout
    )


def _check_callable(
    func: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> None:
    if not callable(func):
        raise TypeError(f"function should be callable, got {type(func).__name__}: {func!r}")
    if isinstance(func, torch.jit.ScriptFunction):
        script.check_arguments(func, args or (), kwargs or {})


def _is_there(agent: Agent, name: Target) -> bool:
    try:
        agent.peer(name)
    except WorkerNotFoundError:
        return False
    return True
