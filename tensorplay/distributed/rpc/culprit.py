"""Which part of an object cannot travel: for the message of the error."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

#: Parts that are looked at before the search is given up.
_MOST_PARTS = 10_000
#: Characters of a path that are told.
_LONGEST_PATH = 200


def describe(obj: Any, error: BaseException, dumps: Callable[[Any], object]) -> str:
    """Returns a sentence that names the innermost part which cannot be pickled.

    Args:
        obj: What could not be pickled; a call's function, arguments and keywords are named
            as such.
        error: Why.
        dumps: Pickles an object or raises.
    """
    path, part = _find(obj, dumps)
    if len(path) > _LONGEST_PATH:
        half = _LONGEST_PATH // 2
        path = f"{path[:half]} ... {path[-half:]}"
    return f"cannot send {path or 'the object'} ({type(part).__name__}): {error}"


def _find(obj: Any, dumps: Callable[[Any], object]) -> tuple[str, Any]:
    path, part = "", obj
    looked, seen = 0, {id(obj)}
    names: Iterator[tuple[str, Any]]
    if _is_call(obj):
        names = zip(("function", "args", "kwargs"), obj, strict=True)
    else:
        names = _parts(obj, "")
    while True:
        try:
            for name, child in names:
                looked += 1
                if looked > _MOST_PARTS:
                    return path, part
                if id(child) not in seen and not _can(child, dumps):
                    seen.add(id(child))
                    path, part = name, child
                    break
            else:
                return path, part
        except Exception:  # an object that does not even let its parts be listed
            return path, part
        names = _parts(part, path)


def _is_call(obj: Any) -> bool:
    return (
        type(obj) is tuple
        and len(obj) == 3
        and (obj[0] is None or callable(obj[0]))
        and type(obj[1]) is tuple
        and type(obj[2]) is dict
    )


def _can(obj: Any, dumps: Callable[[Any], object]) -> bool:
    try:
        dumps(obj)
    except Exception:
        return False
    return True


def _parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the parts of an object, each with the expression that leads to it."""
    if isinstance(obj, torch._subclasses.FakeTensor):
        return  # what it is made of would only mislead
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"{path}[{key!r}]", value
            yield f"{path} key {key!r}", key
    elif isinstance(obj, (list, tuple, set, frozenset, collections.deque)):
        for index, value in enumerate(obj):
            yield f"{path}[{index}]", value
    elif isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
    elif isinstance(obj, functools.partial):
        yield from ((f"{path}.{name}", getattr(obj, name)) for name in ("func", "args", "keywords"))
    elif isinstance(obj, types.FunctionType):
        yield from _variables(obj, path)
    for name, value in getattr(obj, "__dict__", {}).items():
        yield f"{path}.{name}", value
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(obj, name):
                yield f"{path}.{name}", getattr(obj, name)


def _variables(function: types.FunctionType, path: str) -> Iterator[tuple[str, Any]]:
    """Yields what a function that is sent by value takes along."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}'s variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{path}'s global {name!r}", function.__globals__[name]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"{path}'s default {index}", value
