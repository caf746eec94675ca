"""Moving the tensors of a nested structure between host memory and a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence

__all__ = ["home_of", "is_host", "to_home", "to_host"]

#: What has no memory of its own to move from or to.
_HOST_TYPES = ("cpu", "meta")


def home_of(module: Module, default: str | torch.device) -> torch.device:
    """Returns the device that a module expects its inputs on.

    That of its first parameter or buffer, which holds after ``to_empty`` and for a
    submodule that was put elsewhere; ``default`` if it has neither.
    """
    for parameter in module._parameters.values():  # in most cases, and quickly
        if parameter is not None:
            return parameter.device
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device(default) if first is None else first.device


def is_host(device: torch.device) -> bool:
    """Returns whether a tensor on ``device`` can travel as it is."""
    return device.type in _HOST_TYPES


def to_home(value: Any, device: torch.device) -> Any:
    """Returns ``value`` with its host tensors on ``device``; others stay where they are."""
    return _map_tensors(value, lambda tensor: tensor.to(device) if tensor.is_cpu else tensor, {})


def to_host(value: Any) -> Any:
    """Returns ``value`` with all its tensors in host memory."""
    return _map_tensors(value, lambda t: t if is_host(t.device) else t.cpu(), {})


def _map_tensors(
    value: Any, move: Callable[[torch.Tensor], torch.Tensor], memo: dict[int, Any]
) -> Any:
    """Applies ``move`` to the tensors in containers, named tuples and dataclasses.

    What holds no tensor that moves is returned as it is, not copied. An object that occurs
    twice is mapped once, so that what was shared stays shared. ``memo`` maps the ids of
    objects to their results; those objects are alive as long as the outermost value is.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = move(value)
        return memo[id(value)]
    if not isinstance(value, (tuple, list, Mapping)) and not _is_dataclass(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    memo[id(value)] = value  # ends the recursion of a structure that contains itself
    memo[id(value)] = result = _map_container(value, lambda item: _map_tensors(item, move, memo))
    return result


def _map_container(value: Any, visit: Callable[[Any], Any]) -> Any:
    if isinstance(value, PackedSequence):  # its batch sizes belong on the host
        return PackedSequence(
            visit(value.data),
            value.batch_sizes,
            visit(value.sorted_indices),
            visit(value.unsorted_indices),
        )
    if isinstance(value, Mapping):
        items = {key: visit(item) for key, item in value.items()}
        if _same(items.values(), value.values()):
            return value
        if type(value) is dict:
            return items
        duplicate: Any = copy.copy(value)  # keeps the type, and a defaultdict's factory
        for key, item in items.items():
            duplicate[key] = item
        return duplicate
    if isinstance(value, (tuple, list)):
        values = [visit(item) for item in value]
        if _same(values, value):
            return value
        if hasattr(value, "_make"):
            return type(value)._make(values)
        return type(value)(values)
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    changes = {name: visit(getattr(value, name)) for name in names}
    if _same(changes.values(), [getattr(value, name) for name in names]):
        return value
    duplicate = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(duplicate, name, item)  # also of a frozen one
    return duplicate


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
