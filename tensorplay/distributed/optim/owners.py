"""Who has which parameter, and calling all of the owners at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from tensorplay.distributed.rpc import Future, RRef, api
from tensorplay.protocol.messages import PeerInfo

_log = logging.getLogger(__name__)

#: A parameter of this process, or a reference to one of any process.
Param: TypeAlias = "torch.Tensor | RRef[Any]"

#: What public functions take: parameters, and handles of remote modules for all of theirs.
Params: TypeAlias = "Param | Iterable[Any]"


class Call(NamedTuple):
    """A function to run on a peer, or in this process if ``peer`` is None."""

    peer: PeerInfo | None
    function: Callable[..., Any]
    args: tuple[Any, ...]


class Share(NamedTuple):
    """The parameters that one process owns.

    Attributes:
        peer: The owner; None is this process.
        positions: Where they stand in the list that was divided.
    """

    peer: PeerInfo | None
    positions: list[int]


def flatten(parameters: Params) -> list[Param]:
    """Returns the parameters and references of an iterable, in order.

    Args:
        parameters: Tensors, RRefs and handles of remote modules, which stand for all the
            parameters of the module; or one of them.

    Raises:
        TypeError: If there is anything else in it.
    """
    if isinstance(parameters, (torch.Tensor, RRef)) or hasattr(parameters, "remote_parameters"):
        parameters = [parameters]
    flat: list[Param] = []
    for parameter in parameters:
        if hasattr(parameter, "remote_parameters"):
            flat.extend(parameter.remote_parameters())
        elif isinstance(parameter, (torch.Tensor, RRef)):
            flat.append(getattr(parameter, "rref", parameter))
        else:
            raise TypeError(
                "parameters are tensors, RRefs of tensors, or RemoteModules, got "
                f"{type(parameter).__qualname__}"
            )
    return flat


def value(parameter: Param) -> torch.Tensor:
    """Returns the parameter itself, at its owner."""
    if isinstance(parameter, torch.Tensor):
        return parameter
    if not isinstance(parameter, RRef):
        raise TypeError(f"a parameter was expected, not a {type(parameter).__qualname__}")
    found = parameter.local_value()
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"an RRef to a tensor was expected, {parameter!r} is one to a "
            f"{type(found).__qualname__}"
        )
    return found


def owner(parameter: Param) -> PeerInfo | None:
    """Returns who has a parameter; None is this process.

    Raises:
        OwnerLostError: If its owner is gone.
    """
    if not isinstance(parameter, RRef) or parameter.is_owner():
        return None
    return parameter._live_owner("using it")


def same_peer(a: PeerInfo | None, b: PeerInfo | None) -> bool:
    """Returns whether two peers are the same process; None is this one."""
    return _key(a) == _key(b)


def shares(parameters: Sequence[Param]) -> list[Share]:
    """Divides parameters by owner; owners come in the order of their first parameter."""
    by_owner: dict[int, Share] = {}
    for position, parameter in enumerate(parameters):
        peer = owner(parameter)
        by_owner.setdefault(_key(peer), Share(peer, [])).positions.append(position)
    return list(by_owner.values())


def call_owners(
    parameters: Sequence[Param], function: Callable[..., Any], *args: Any
) -> list[tuple[Share, Any]]:
    """Runs ``function(its parameters, *args)`` at every owner; returns the results."""
    parts = shares(parameters)
    calls = [
        Call(part.peer, function, ([parameters[i] for i in part.positions], *args))
        for part in parts
    ]
    return list(zip(parts, call_all(calls), strict=True))


def call_all(calls: Sequence[Call]) -> list[Any]:
    """Makes all the calls at the same time and returns their results.

    Raises:
        Exception: What the first of those that failed raised, once all have ended. The
            failures of the others are logged.
    """
    results = try_all(calls)
    raise_failed(calls, results)
    return results


def raise_failed(calls: Sequence[Call], results: list[Any]) -> None:
    """Raises the first exception among the results, if there is one, and logs the others.

    The results are cleared then: the exception's traceback leads to the frames that hold
    them, so they would keep each other, and what else is in them, alive.
    """
    failed = [index for index, result in enumerate(results) if isinstance(result, Exception)]
    if not failed:
        return
    for index in failed[1:]:
        peer = calls[index].peer
        where = "this process" if peer is None else peer.name
        text = f"{type(results[index]).__name__}: {results[index]}"
        _log.error("a call failed on %s, too: %s", where, text)
    first = results[failed[0]]
    results.clear()
    try:
        raise first
    finally:
        del first


def try_all(calls: Sequence[Call]) -> list[Any]:
    """Makes all the calls at the same time; what a call raises is its result."""
    results: list[Any] = [None] * len(calls)
    futures: list[tuple[int, Future[Any]]] = []
    for index, call in enumerate(calls):
        if call.peer is not None:
            agent = api._get_current_rpc_agent()
            try:
                future = agent.call(call.peer, call.function, call.args, hooks=False)
            except Exception as error:
                results[index] = error
            else:
                futures.append((index, future))
    for index, call in enumerate(calls):  # while the others are at work
        if call.peer is None:
            results[index] = _outcome(call.function, *call.args)
    for index, future in futures:
        results[index] = _outcome(future.wait)
    return results


def _key(peer: PeerInfo | None) -> int:
    return 0 if peer is None else peer.incarnation


def _outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return error
