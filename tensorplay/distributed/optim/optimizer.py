"""``DistributedOptimizer``: one optimizer over parameters of many processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from tensorplay.distributed import autograd
from tensorplay.distributed.optim import shard as remote
from tensorplay.distributed.optim.gathered import Gathered, needs_closure
from tensorplay.distributed.optim.groups import Group, as_group, by_owner, fill, listed
from tensorplay.distributed.optim.options import Options, changes, options, snapshot, update
from tensorplay.distributed.optim.owners import Call, call_all, raise_failed, same_peer, try_all
from tensorplay.distributed.optim.parts import Part, State, params_of
from tensorplay.distributed.optim.shard import Shard
from tensorplay.errors import ConfigError, SerializationError
from tensorplay.protocol.messages import PeerInfo

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizes parameters where they are: on any workers, and in this process.

    Each process that owns some of the parameters gets an optimizer of the given class for
    them; a step is one round trip to all of the processes at the same time. It is a
    ``torch.optim.Optimizer``: learning rate schedulers, ``torch.amp.GradScaler``, hooks and
    checkpoints work as with any other, and ``state_dict()`` is what one optimizer over all
    the parameters would give. When it is dropped, the workers drop their parts.

    An optimizer whose ``step`` requires a closure, such as LBFGS, runs in this process on
    copies of the remote parameters.

    Args:
        optimizer_class: Any class of ``torch.optim``, or a subclass of
            ``torch.optim.Optimizer`` that the workers can import or unpickle.
        params_rref: RRefs of parameters, parameters of this process, and RemoteModules for
            all of theirs, in any mix; or (name, parameter) pairs, or groups of them:
            ``{"params": [...], "lr": ...}``.
        *args: Further arguments of the class.
        **kwargs: Keyword arguments of the class.

    Attributes:
        param_groups: The groups. Options can be changed; the next step takes the changes
            along. For a parameter of another process there is a ``RemoteParameter``.
        defaults: The options of a group that sets none.
        state: A read-only mapping from parameters to what the optimizer keeps for them,
            fetched from the owners when it is read.

    Raises:
        OwnerLostError: If the owner of a parameter is gone.
        Exception: Whatever the class raises, on whichever worker.

    Example:
        Local and remote layers trained by the same lines::

            optimizer = DistributedOptimizer(
                torch.optim.SGD, [*head.parameters(), *body.remote_parameters()], lr=0.05
            )
            optimizer.zero_grad()
            loss_fn(head(body(x)), y).backward()
            optimizer.step()
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._class = optimizer_class
        self._args = args
        self._kwargs = kwargs
        self._parts: list[Part] = []
        self._seen: list[Options] = []
        self._gathered = Gathered() if needs_closure(optimizer_class) else None
        given = listed(params_rref)
        grouped = isinstance(given[0], dict)
        groups = [as_group(item) for item in given] if grouped else [as_group({"params": given})]
        defaults, ready = self._place(groups, grouped)
        self._ready = False
        super().__init__(ready, defaults)
        self._ready = True
        self.state = State(self._parts, self.param_groups)  # type: ignore[assignment]
        self._seen = [snapshot(group) for group in self.param_groups]

    def step(  # type: ignore[override]
        self,
        context_id: int | Callable[[], Any] | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Makes a step on all the owners, and waits until they have.

        Args:
            context_id: A distributed autograd context, whose gradients are used and ``.grad``
                left alone. By default the gradients in ``.grad`` are used, where a plain
                ``loss.backward()`` puts them. May be the closure instead.
            closure: Evaluates the model, runs backward and returns the loss. It runs in this
                process, once, before the step; as often as an optimizer that requires one
                wants to.

        Returns:
            The loss, if there is a closure.

        Raises:
            WorkerLostError: If an owner dies before it has made its step.
            ConfigError: If the optimizer requires a closure and there is none.
            Exception: Whatever an optimizer raises, when all of them have ended.
        """
        if callable(context_id):
            closure, context_id = context_id, None
        if context_id is not None:
            autograd.get_gradients(context_id)  # raises if there is no such context
        if self._gathered is not None:
            return self._step_gathered(self._gathered, closure, context_id)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        new = [changes(g, seen) for g, seen in zip(self.param_groups, self._seen, strict=True)]
        calls = [
            part.call(remote.step, context_id, [new[group] for group in part.groups])
            for part in self._parts
        ]
        self._synchronize(call_all(calls))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all the parameters.

        Args:
            set_to_none: Whether they become None; otherwise zero.

        Raises:
            WorkerLostError: If an owner is gone.
        """
        if self._gathered is not None:
            self._gathered.zero_grad(set_to_none)
        call_all([part.call(remote.zero_grad, set_to_none) for part in self._parts])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, of any processes.

        Args:
            param_group: ``{"params": [...]}`` as for the constructor, and options; those it
                does not set have their defaults.

        Raises:
            Exception: Whatever the optimizer of an owner raises; no group is added then.
        """
        if not self._ready:
            super().add_param_group(param_group)
            return
        _, (ready,) = self._place([as_group(param_group)], True)
        try:
            super().add_param_group(ready)
        except Exception:
            self._take_back(len(self._seen))
            raise
        self._seen.append(snapshot(ready))

    def __getstate__(self) -> NoReturn:
        raise SerializationError(
            "a DistributedOptimizer stays in the process that made it: save its state_dict(), "
            "or make one there of the same RRefs"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The last step of load_state_dict, which has checked and matched what it was given.
        by_param, groups = state["state"], state["param_groups"]
        others = {k: v for k, v in by_param.items() if not isinstance(k, torch.Tensor)}
        calls = []
        for part in self._parts:
            indexes = itertools.count()
            mine = [
                {**options(groups[group]), "params": [next(indexes) for _ in positions]}
                for group, positions in part.groups.items()
            ]
            kept = {
                index: by_param[param]
                for index, param in enumerate(params_of(part, groups))
                if param in by_param
            }
            calls.append(part.call(remote.load, kept | others, mine))
        loaded = call_all(calls)
        self.param_groups[:] = groups
        self._synchronize(loaded)

    def _synchronize(self, answers: Sequence[Sequence[Options]]) -> None:
        """Takes over what the owners' optimizers set themselves."""
        for part, answer in zip(self._parts, answers, strict=True):
            for group, new in zip(part.groups, answer, strict=True):
                update(self.param_groups[group], new)
        self._seen = [snapshot(group) for group in self.param_groups]

    def _step_gathered(
        self,
        gathered: Gathered,
        closure: Callable[[], Any] | None,
        context_id: int | None,
    ) -> Any:
        name = getattr(self._class, "__name__", str(self._class))
        if closure is None or context_id is not None:
            raise ConfigError(
                f"{name} reevaluates the model within its step: call step(closure) with a "
                "function that runs forward and backward and returns the loss, and no context"
            )
        (part,) = self._parts
        assert isinstance(part.shard, Shard)
        new = [changes(g, seen) for g, seen in zip(self.param_groups, self._seen, strict=True)]
        gathered.read()
        answer, loss = part.shard.step(None, new, gathered.around(closure))
        gathered.write()
        self._synchronize([answer])
        return loss

    def _place(
        self, groups: Sequence[Group], grouped: bool
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Hands new groups to the owners of their parameters.

        Args:
            groups: The groups, which follow those that are there.
            grouped: Whether the class is to be given groups, not a list of parameters.

        Returns:
            The defaults, and the groups as ``torch.optim.Optimizer`` takes them.
        """
        first = len(self._seen)
        if not any(group.params for group in groups) and not first:
            raise ValueError("optimizer got an empty parameter list")
        entries = [list(group.params) for group in groups]
        if self._gathered is not None:
            for given in groups:
                given.params = list(self._gathered.add(given.params))
        owners = by_owner(groups)
        parts = [self._part_at(owner.peer) for owner in owners]
        calls = []
        for owner, old in zip(owners, parts, strict=True):
            mine = [groups[g].of(positions) for g, positions in owner.groups.items()]
            if old is not None:
                calls.append(old.call(remote.add_group, *mine))
                continue
            create = remote.create if owner.peer is None else remote.create_remotely
            params = mine if grouped else mine[0]["params"]
            calls.append(Call(owner.peer, create, (self._class, params, self._args, self._kwargs)))
        results = try_all(calls)
        defaults: dict[str, Any] = {}
        found: list[dict[str, Any]] = [dict(group.options) for group in groups]
        answers = [
            (owner, old, result)
            for owner, old, result in zip(owners, parts, results, strict=True)
            if not isinstance(result, Exception)
        ]
        for owner, old, answer in answers:
            if old is None:
                shard, (defaults, infos) = answer
                self._parts.append(part := Part(owner.peer, shard, {}))
            else:
                part, infos = old, [answer]
            for (group, positions), info in zip(owner.groups.items(), infos, strict=True):
                part.groups[first + group] = positions
                found[group].update(info.options)
                fill(entries[group], positions, info)
        if len(answers) < len(results):
            self._take_back(first)
            raise_failed(calls, results)
        for ready, given, params in zip(found, groups, entries, strict=True):
            ready["params"] = given.named(params)
        return defaults, found

    def _part_at(self, peer: PeerInfo | None) -> Part | None:
        return next((part for part in self._parts if same_peer(part.peer, peer)), None)

    def _take_back(self, first: int) -> None:
        """Removes the groups from the ``first`` one on, which were just added."""
        calls = []
        for part in list(self._parts):
            added = [group for group in part.groups if group >= first]
            if len(added) == len(part.groups):
                self._parts.remove(part)
            elif added:
                del part.groups[added[0]]
                calls.append(part.call(remote.remove_last_group))
        try_all(calls)
