"""Which part of an object cannot travel: for the message of the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Parts that are looked at before the search is given up.
_MOST_PARTS = 10_000


def describe(obj: Any, error: BaseException, dumps: Callable[[Any], object]) -> str:
    """Returns a sentence that names the innermost part which cannot be pickled.

    Args:
        obj: What could not be pickled; a call's function, arguments and keywords are named
            as such.
        error: Why.
        dumps: Pickles an object or raises.
    """
    path, part = _find(obj, dumps)
    return f"cannot send {path or 'the object'} ({type(part).__name__}): {error}"


def _find(obj: Any, dumps: Callable[[Any], object]) -> tuple[str, Any]:
    path, part = "", obj
    looked, seen = 0, {id(obj)}
    if _is_call(obj):
        names = zip(("function", "args", "kwargs"), obj, strict=True)
    else:
        names = _parts(obj, "")
    while True:
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
        names = _parts(part, path)


def _is_call(obj: Any) -> bool:
    return (
        type(obj) is tuple
        and len(obj) == 3
        and callable(obj[0])
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
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"{path}[{key!r}]", value
            yield f"{path} key {key!r}", key
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for index, value in enumerate(obj):
            yield f"{path}[{index}]", value
    elif callable(obj) and getattr(obj, "__closure__", None):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__, strict=True):
            yield f"{path}'s variable {name!r}", cell.cell_contents
    for name, value in getattr(obj, "__dict__", {}).items():
        yield f"{path}.{name}", value
