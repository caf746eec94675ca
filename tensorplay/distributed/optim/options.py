"""The options of a parameter group (``lr``, ``betas``, ...), and what became of them.

A group lives in two places: with the user, who changes it, and with each process that owns
parameters of it, whose optimizer may change it, too.  So only changes travel.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree

Options: TypeAlias = dict[str, Any]

#: What a group has beside its options.
_NO_OPTIONS = ("params", "param_names")

_MISSING = object()


def options(group: Mapping[str, Any]) -> Options:
    """Returns the options of a group; the values are its own."""
    return {name: value for name, value in group.items() if name not in _NO_OPTIONS}


def snapshot(group: Mapping[str, Any]) -> Options:
    """Returns the options of a group as copies, to compare with later."""
    return {name: _copy(value) for name, value in options(group).items()}


def changes(group: Mapping[str, Any], seen: Options) -> Options:
    """Returns the options of a group that are not as they were."""
    return {
        name: value
        for name, value in options(group).items()
        if not _same(value, seen.get(name, _MISSING))
    }


def replaced(group: Mapping[str, Any], before: Mapping[str, Any]) -> Options:
    """Returns the options that are other objects than in a shallow copy made before."""
    return {
        name: value
        for name, value in options(group).items()
        if value is not before.get(name, _MISSING)
    }


def update(group: dict[str, Any], new: Options) -> None:
    """Sets options of a group; one that is a tensor, and may be in use as such, stays it."""
    for name, value in new.items():
        old = group.get(name)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
            old.copy_(value)
        else:
            group[name] = value


def detached(value: Any) -> Any:
    """Returns a nested value with copies of its tensors in host memory."""
    return _pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.detach().to("cpu", copy=True),
        value,
    )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a, b.to(a.device))
        )
    return type(a) is type(b) and bool(a == b)
