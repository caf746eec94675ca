"""The names in a pickle that stand for plain values, and how those are built.

Nothing here gives more than the value: a constructor gets exactly what the pickle of such a
value has, so that none makes something large out of something small.
"""

from __future__ import annotations

import builtins
import collections
from collections.abc import Callable, Sequence
from types import EllipsisType, NotImplementedType
from typing import Any

import torch

from tensorplay import errors

__all__ = ["constructor", "find", "has_items", "has_state"]

#: Types that may be named; the constructors among them are in ``_CONSTRUCTORS``.
_TYPES = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, range, set),
    *(slice, str, tuple),
)
_CONTAINERS = (collections.Counter, collections.defaultdict, collections.deque)
_VALUES: dict[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in _TYPES},
    **{("collections", kind.__name__): kind for kind in (*_CONTAINERS, collections.OrderedDict)},
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}
_DESCRIPTIONS = (torch.dtype, torch.layout, torch.memory_format)

Plain = (bool, bytes, complex, float, int, str, EllipsisType, NotImplementedType, type(None))


def _layout(name: str) -> torch.layout:
    """Returns a layout by its full name, as the pickle of one has it."""
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise errors.ProtocolError(f"{name!r} is no layout of a tensor")
    return found


def find(module: str, name: str) -> Any:
    """Returns what a name stands for if it is plain, else None."""
    if (module, name) == ("torch.serialization", "_get_layout"):
        return _layout
    if module == "torch._utils" and name.startswith("torch."):  # a memory format
        return find("torch", name.removeprefix("torch."))
    found = _VALUES.get((module, name))
    if found is not None:
        return found
    if module == "torch":
        found = vars(torch).get(name)
        return found if isinstance(found, _DESCRIPTIONS) else None
    if module == "builtins":
        found = vars(builtins).get(name)
    elif module == errors.__name__:
        found = vars(errors).get(name)
    return found if _is_exception(found) else None


def _is_exception(found: Any) -> bool:
    """Returns whether something is an exception that may be raised here.

    Not those that end a process or a generator, nor those with a constructor of their own.
    """
    return isinstance(found, type) and issubclass(found, Exception)


def has_state(cls: type) -> bool:
    """Returns whether the pickle of an object of a plain type may have further attributes."""
    if issubclass(cls, Exception):
        return find(cls.__module__, cls.__qualname__) is cls
    return cls is collections.OrderedDict


def has_items(obj: Any) -> bool:
    """Returns whether an object is a container to which a pickle may add."""
    return type(obj) in (list, set, dict, collections.OrderedDict, *_CONTAINERS)


def constructor(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Returns whether a plain type may be called so; None if it is no plain type."""
    if func is _layout:
        return len(args) == 1 and type(args[0]) is str
    if not isinstance(func, type):
        return None
    check = _CONSTRUCTORS.get(func)
    if check is not None:
        return check(args)
    if _is_exception(func) and find(func.__module__, func.__qualname__) is func:
        return True
    return False if func in _TYPES else None


def _are(*kinds: type | tuple[type, ...]) -> Callable[[Sequence[Any]], bool]:
    def check(args: Sequence[Any]) -> bool:
        return len(args) <= len(kinds) and all(
            type(arg) in (kind if isinstance(kind, tuple) else (kind,))
            for arg, kind in zip(args, kinds, strict=False)
        )

    return check


def _numbers(args: Sequence[Any]) -> bool:
    return all(type(arg) is int for arg in args)


def _sizes(args: Sequence[Any]) -> bool:
    return len(args) == 1 and type(args[0]) in (tuple, list) and _numbers(args[0])


def _factory(args: Sequence[Any]) -> bool:
    # What it makes is asked for by code of this process, without arguments.
    return len(args) <= 1 and (not args or args[0] is None or isinstance(args[0], type))


_LISTS = (list, tuple)
_BOUND = (int, float, str, bool, type(None))
_CONSTRUCTORS: dict[type, Callable[[Sequence[Any]], bool]] = {
    bytearray: _are(bytes),
    complex: _are(float, float),
    frozenset: _are(_LISTS),
    set: _are(_LISTS),
    range: _numbers,
    slice: _are(_BOUND, _BOUND, _BOUND),
    collections.Counter: _are(dict),
    collections.OrderedDict: _are(_LISTS),
    collections.defaultdict: _factory,
    collections.deque: _are(_LISTS, (int, type(None))),
    torch.Size: _sizes,
    torch.device: _are(str, int),
}
