"""What the tests of the optimizer share; workers import it, too."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.optim import DistributedOptimizer, gradients
from tensorplay.distributed.optim.shard import Shard
from tensorplay.distributed.rpc import RRef, api

Optimizers = tuple[torch.optim.Optimizer, DistributedOptimizer]

#: Where the parameters of the twins are; None is this process, "me" an RRef of its own.
PLACES = ("worker0", None, "worker1", "worker0", "me")


def value(number: int) -> torch.Tensor:
    """Returns the initial value of a parameter."""
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(number))


def make_parameter(number: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(value(number))


class Twins:
    """The same parameters twice: all local, and all over the place."""

    def __init__(self, places: Sequence[str | None] = PLACES) -> None:
        self.local = [make_parameter(number) for number in range(len(places))]
        self.spread = [self._place(place, number) for number, place in enumerate(places)]
        self._random = torch.Generator().manual_seed(7)

    def _place(self, place: str | None, number: int) -> Any:
        if place is None:
            return make_parameter(number)
        if place == "me":
            return RRef(make_parameter(number))
        return rpc.remote(place, make_parameter, (number,))

    def optimizers(self, cls: Any, *args: Any, **kwargs: Any) -> Optimizers:
        """Returns an optimizer over each, which share no argument."""
        return (
            cls(self.local, *copy.deepcopy(args), **copy.deepcopy(kwargs)),
            DistributedOptimizer(cls, self.spread, *copy.deepcopy(args), **copy.deepcopy(kwargs)),
        )

    def backward(self) -> None:
        """Gives both the same gradients."""
        grads = [torch.randn(p.shape, generator=self._random) for p in self.local]
        for parameter, grad in zip(self.local, grads, strict=True):
            parameter.grad = grad.clone()
        gradients.set_grads(self.spread, [grad.clone() for grad in grads])

    def values(self) -> list[torch.Tensor]:
        """Returns the values that the spread ones have."""
        return [(p.to_here() if isinstance(p, RRef) else p).detach() for p in self.spread]

    def assert_same(self) -> None:
        for ours, theirs in zip(self.values(), self.local, strict=True):
            assert torch.equal(ours, theirs)

    def assert_same_grads(self) -> None:
        for ours, theirs in zip(gradients.get_grads(self.spread), self.local, strict=True):
            assert same(ours, theirs.grad)


def same(a: Any, b: Any) -> bool:
    """Returns whether two nested values are the same, tensors bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a is b or a == b)


@contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects the names of the workers that are called."""
    agent = api._get_current_rpc_agent()
    call: Callable[..., Any] = agent.call
    called: list[str] = []

    def counting(peer: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(peer.name)
        return call(peer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(agent, "call", counting)
        yield called


def live_shards() -> int:
    """Returns how many shards there are in this process."""
    return sum(isinstance(thing, Shard) for thing in gc.get_objects())


class FailsToStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("no step today")


class FailsToStart(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        raise ArithmeticError("no start today")


class Warming(torch.optim.SGD):
    """Changes an option of its own within its step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["warmth"] = group.get("warmth", 0) + 1
