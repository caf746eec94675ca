"""Optimizing remote parameters in this process, on copies.

An optimizer such as LBFGS reevaluates the model within its step and looks at all the
parameters together, so it cannot be divided among their owners.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorplay.distributed.optim import gradients
from tensorplay.distributed.optim.options import detached
from tensorplay.distributed.optim.owners import Call, Param, call_all, call_owners, shares, value
from tensorplay.distributed.rpc import RRef
from tensorplay.distributed.rpc.allow import wire_safe


def needs_closure(optimizer_class: Callable[..., Any]) -> bool:
    """Returns whether the ``step`` of a class cannot do without a closure."""
    step = getattr(optimizer_class, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    return closure is not None and closure.default is inspect.Parameter.empty


class Gathered:
    """Copies of remote parameters, which are brought up to date and written back."""

    def __init__(self) -> None:
        self._rrefs: list[RRef[Any]] = []
        self._copies: list[torch.Tensor] = []

    def add(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """Returns the parameters of this process as they are, and copies of the others."""
        remote = [p for p in params if isinstance(p, RRef) and not p.is_owner()]
        copies = _read(remote)
        self._rrefs += remote
        self._copies += copies
        following = iter(copies)
        return [
            next(following) if isinstance(p, RRef) and not p.is_owner() else value(p)
            for p in params
        ]

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that evaluates the model with the values of the copies."""

        def evaluate() -> Any:
            self.write()
            with torch.enable_grad():
                loss = closure()
            for copy, grad in zip(self._copies, gradients.get_grads(self._rrefs), strict=True):
                copy.grad = grad
            return loss

        return evaluate

    @torch.no_grad()
    def read(self) -> None:
        """Gives the copies the values that their parameters have."""
        for copy, new in zip(self._copies, _read(self._rrefs), strict=True):
            copy.copy_(new)

    def write(self) -> None:
        """Gives the parameters the values that their copies have."""
        call_all(
            [
                Call(
                    peer,
                    _write,
                    (
                        [self._rrefs[i] for i in here],
                        [self._copies[i].detach() for i in here],
                    ),
                )
                for peer, here in shares(self._rrefs)
            ]
        )

    def zero_grad(self, set_to_none: bool) -> None:
        """Resets the gradients of the parameters."""
        gradients.zero(self._rrefs, set_to_none)


def _read(rrefs: Sequence[RRef[Any]]) -> list[torch.Tensor]:
    copies: dict[int, torch.Tensor] = {}
    for share, found in call_owners(rrefs, _values):
        for position, (data, requires_grad) in zip(share.positions, found, strict=True):
            copies[position] = data.requires_grad_(requires_grad)
    return [copies[position] for position in range(len(rrefs))]


# These run at the owners.


@wire_safe()
def _values(params: Sequence[Param]) -> list[tuple[torch.Tensor, bool]]:
    return [(detached(value(param)), value(param).requires_grad) for param in params]


@wire_safe()
@torch.no_grad()
def _write(params: Sequence[Param], data: Sequence[torch.Tensor]) -> None:
    for param, new in zip(params, data, strict=True):
        value(param).copy_(new)
