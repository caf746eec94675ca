"""Proxies that call methods of a referenced object at its owner.

What travels is a ``Method``: the reference and a name, which the owner turns into the bound
method as it unpickles the request.  The owner thus runs the method itself, with all that
decorators have marked it with, and one request does it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from tensorplay.distributed.rpc import allow
from tensorplay.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from tensorplay.distributed.rpc.functions import async_execution
from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.rref import RRef
from tensorplay.errors import RRefError

__all__ = ["RRefProxy"]

#: Calls a method: reference, name of the method, seconds, arguments.
Call = Callable[..., Any]


class Method:
    """A method of a referenced object; at the owner, unpickling gives the bound method."""

    __slots__ = ("__qualname__", "_name", "_rref")

    def __init__(self, rref: RRef[Any], name: str) -> None:
        self._rref = rref
        self._name = name
        self.__qualname__ = f"RRef.{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _bound(self._rref, self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound, (self._rref, self._name)


class RRefProxy:
    """Turns ``proxy.method(...)`` into a call at the owner of a reference.

    Args:
        rref: The reference.
        call: One of ``call_sync``, ``call_async`` and ``call_remote``.
        timeout: Seconds for each call, 0 or None for no limit; by default the agent's.
    """

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(
        self, rref: RRef[Any], call: Call, timeout: float | None = UNSET_RPC_TIMEOUT
    ) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, self._rref, name, self._timeout)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RRefError("a proxy of an RRef cannot be sent or copied: send the RRef")

    __deepcopy__ = __reduce_ex__

    def __repr__(self) -> str:
        return f"RRefProxy({self._rref!r}, {self._call.__name__})"


def call_async(
    rref: RRef[Any], method: str, timeout: float | None, /, *args: Any, **kwargs: Any
) -> Future[Any]:
    """Calls a method at the owner and returns the future of its result."""
    owner = rref._live_owner(f"{method}()")
    return rref._context.agent.call(owner, Method(rref, method), args, kwargs, timeout=timeout)


def call_sync(
    rref: RRef[Any], method: str, timeout: float | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a method at the owner and returns its result."""
    return call_async(rref, method, timeout, *args, **kwargs).wait()


def call_remote(
    rref: RRef[Any], method: str, timeout: float | None, /, *args: Any, **kwargs: Any
) -> RRef[Any]:
    """Calls a method at the owner, where its result stays; returns a reference to that.

    Raises:
        AttributeError: If the object has no such method; the owner is asked once.
    """
    owner = rref._live_owner(f"{method}()")
    agent = rref._context.agent
    if method not in rref._methods:
        agent.call(owner, _require, (rref, method), timeout=timeout, hooks=False).wait()
        rref._methods.add(method)
    return RRef._create_remote(agent, owner, Method(rref, method), args, kwargs, timeout)


@allow.wire_safe(builds=True, calls=False)
def _bound(rref: RRef[Any], name: str) -> Any:
    value = rref.local_value()
    allow.check_method(value, name)
    return getattr(value, name)


@allow.wire_safe()
@async_execution
def _require(rref: RRef[Any], name: str) -> Future[None]:
    guard = allow.current()

    def look(done: torch.futures.Future[Any]) -> None:
        with allow.guarding(guard):
            allow.check_method(done.value(), name)
        getattr(done.value(), name)

    return rref._value_future()._then(look)
