"""The part of a distributed optimizer that runs where its parameters are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tensorplay.distributed.autograd import dist
from tensorplay.distributed.optim.options import Options, detached, options, replaced, update
from tensorplay.distributed.optim.owners import value
from tensorplay.distributed.rpc import RRef
from tensorplay.distributed.rpc.allow import wire_safe

T = TypeVar("T")

#: One lock for each parameter that is optimized in this process.  A step on gradients of a
#: distributed autograd context puts them into ``.grad`` for a moment, where the optimizer of
#: another trainer would take them for its own.
_locks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_locks_guard = threading.Lock()


@wire_safe(builds=True, calls=False)
class ParamInfo(NamedTuple):
    """What is known of a parameter elsewhere."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@wire_safe(builds=True, calls=False)
class GroupInfo(NamedTuple):
    """A parameter group: its options, and what its parameters are like."""

    options: Options
    params: list[ParamInfo]


@wire_safe(builds=True, calls=False)
class ShardInfo(NamedTuple):
    """What the constructor of an optimizer made of its arguments."""

    defaults: dict[str, Any]
    groups: list[GroupInfo]


class Shard:
    """A ``torch.optim`` optimizer over parameters of this process.

    Args:
        optimizer_class: Makes the optimizer.
        params: Parameters or RRefs of them, alone, as (name, parameter), or in groups.
        args: Further arguments of the class.
        kwargs: Keyword arguments of the class.

    Raises:
        Exception: Whatever the class raises.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.optimizer = optimizer_class(_resolved(params), *args, **kwargs)
        self._held = _locks_of(self._params())

    def describe(self) -> ShardInfo:
        """Returns the defaults and the groups."""
        groups = [self._group_info(group) for group in self.optimizer.param_groups]
        return ShardInfo(dict(self.optimizer.defaults), groups)

    def step(
        self,
        context_id: int | None,
        changes: Sequence[Options],
        closure: Callable[[], Any] | None = None,
    ) -> tuple[list[Options], Any]:
        """Makes a step.

        Args:
            context_id: The distributed autograd context whose gradients to use; without one
                those in ``.grad``.
            changes: Options of each group to set before.
            closure: Reevaluates the model; in this process only.

        Returns:
            The options of each group that the optimizer set, and what its step returned.
        """
        groups = self.optimizer.param_groups
        with self._exclusively():
            for group, new in zip(groups, changes, strict=True):
                update(group, new)
            before = [dict(group) for group in groups]
            with self._gradients(context_id):
                result = self.optimizer.step(closure) if closure else self.optimizer.step()
        return [replaced(group, old) for group, old in zip(groups, before, strict=True)], result

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets the gradients of the parameters."""
        with self._exclusively():
            self.optimizer.zero_grad(set_to_none)

    def state(self) -> dict[Any, Any]:
        """Returns the state by index of the parameter among those of all the groups."""
        state: dict[Any, Any] = self.optimizer.state_dict()["state"]
        return state

    def load(self, state: Mapping[Any, Any], groups: list[dict[str, Any]]) -> list[Options]:
        """Replaces state and options; returns the options of each group as they are then."""
        with self._exclusively():
            self.optimizer.load_state_dict({"state": dict(state), "param_groups": groups})
        return [options(group) for group in self.optimizer.param_groups]

    def add_group(self, group: dict[str, Any]) -> GroupInfo:
        """Adds a parameter group and returns what became of it."""
        self.optimizer.add_param_group({**group, "params": _resolved(group["params"])})
        self._held = _locks_of(self._params())
        return self._group_info(self.optimizer.param_groups[-1])

    def remove_last_group(self) -> None:
        """Takes back what ``add_group`` added."""
        self.optimizer.param_groups.pop()

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _group_info(self, group: Mapping[str, Any]) -> GroupInfo:
        params = [ParamInfo(p.shape, p.dtype, p.requires_grad) for p in group["params"]]
        return GroupInfo(options(group), params)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Keeps other optimizers off the parameters."""
        held = self._held
        for lock in held:
            lock.acquire()
        try:
            yield
        finally:
            for lock in held:
                lock.release()

    @contextmanager
    def _gradients(self, context_id: int | None) -> Iterator[None]:
        """Has ``.grad`` be the gradients of a context, for a while."""
        if context_id is None:
            yield
            return
        gradients = _context_gradients(context_id)
        params = self._params()
        kept = [param.grad for param in params]
        try:
            for param in params:
                param.grad = gradients.get(param)
            yield
        finally:
            for param, grad in zip(params, kept, strict=True):
                param.grad = grad


# What the process that has the DistributedOptimizer calls: ``shard`` is the shard itself if
# that is the owner's process, too, else a reference; what is returned then is a copy.


def create(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    params: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Shard, ShardInfo]:
    """Makes a shard of this process."""
    shard = Shard(optimizer_class, params, args, kwargs)
    return shard, shard.describe()


@wire_safe(vets=(0,))
def create_remotely(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    params: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[RRef[Shard], ShardInfo]:
    """Makes a shard for another process."""
    shard, info = create(optimizer_class, params, args, kwargs)
    return RRef(shard), detached(info)


@wire_safe()
def step(
    shard: Shard | RRef[Shard], context_id: int | None, changes: Sequence[Options]
) -> list[Options]:
    """See ``Shard.step``."""
    found = _found(shard)
    new, _ = found.step(context_id, changes)
    return _answer(shard, new)


@wire_safe()
def zero_grad(shard: Shard | RRef[Shard], set_to_none: bool) -> None:
    """See ``Shard.zero_grad``."""
    _found(shard).zero_grad(set_to_none)


@wire_safe()
def state(shard: Shard | RRef[Shard]) -> dict[Any, Any]:
    """See ``Shard.state``."""
    found = _found(shard)
    with found._exclusively():
        return _answer(shard, found.state())


@wire_safe()
def load(
    shard: Shard | RRef[Shard], state: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> list[Options]:
    """See ``Shard.load``."""
    return _answer(shard, _found(shard).load(state, groups))


@wire_safe()
def add_group(shard: Shard | RRef[Shard], group: dict[str, Any]) -> GroupInfo:
    """See ``Shard.add_group``."""
    return _answer(shard, _found(shard).add_group(group))


@wire_safe()
def remove_last_group(shard: Shard | RRef[Shard]) -> None:
    """See ``Shard.remove_last_group``."""
    _found(shard).remove_last_group()


def _found(shard: Shard | RRef[Shard]) -> Shard:
    found: Any = shard.local_value() if isinstance(shard, RRef) else shard
    if not isinstance(found, Shard):
        raise TypeError(f"an RRef to a shard was expected, not to a {type(found).__qualname__}")
    return found


def _answer(shard: Shard | RRef[Shard], result: T) -> T:
    if not isinstance(shard, RRef):
        return result
    copied: T = detached(result)
    return copied


def _resolved(params: Sequence[Any]) -> list[Any]:
    """Returns the argument of an optimizer's class with the parameters in place of RRefs."""

    def resolve(item: Any) -> Any:
        if isinstance(item, dict):
            return {**item, "params": [resolve(param) for param in item["params"]]}
        if isinstance(item, tuple):
            return (item[0], value(item[1]))
        return value(item)

    return [resolve(item) for item in params]


def _locks_of(params: Sequence[torch.Tensor]) -> list[Any]:
    """Returns the locks of parameters in the order in which every shard takes them."""
    with _locks_guard:
        locks = {id(lock): lock for lock in (_lock_of(param) for param in params)}
    return [locks[key] for key in sorted(locks)]


def _lock_of(param: torch.Tensor) -> Any:
    if param not in _locks:
        _locks[param] = threading.RLock()
    return _locks[param]


def _context_gradients(context_id: int) -> Mapping[torch.Tensor, torch.Tensor]:
    """Returns the gradients that a context has in this process."""
    if not dist._is_valid_context(context_id):
        return {}
    return dist.get_gradients(context_id)
