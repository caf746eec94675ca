"""Numbers for functions, so that each is pickled once and travels once to each peer.

Only functions that are pickled by reference get one: what such a pickle says never
changes, however the function itself does.  The caller's first request with a number
brings the definition along.  Requests to one peer arrive in order and once, so the callee
knows every number that it meets.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensorplay.distributed.rpc import pickler
from tensorplay.errors import ProtocolError

#: Numbers go up to this; further functions travel with each call.
MOST_FUNCTIONS = 1 << 14
#: A definition is a reference; a longer one is none.
MOST_DEFINITION_BYTES = 1 << 10


class Numbered(NamedTuple):
    """A function that has a number.

    Attributes:
        number: The number, at least 1.
        definition: The pickle of the function.
    """

    number: int
    definition: bytes


_numbers = itertools.count(1)
_numbered: dict[int, tuple[weakref.ref[Any], Numbered | None]] = {}  # by id of the function
_lock = threading.RLock()  # a finalizer may pickle


def find(function: Any) -> Numbered | None:
    """Returns the number of a function of this process, or None if it can have none."""
    kind = type(function)
    if kind is types.FunctionType:
        # Asked each time: it may be replaced, or its module registered to go by value.
        if not pickler.is_importable(function):
            return None
    elif kind is not types.BuiltinFunctionType:
        return None
    known = _numbered.get(id(function))
    return _enter(function) if known is None else known[1]


def _enter(function: Any) -> Numbered | None:
    key = id(function)
    with _lock:
        known = _numbered.get(key)
        if known is not None:
            return known[1]
        numbered = None
        if type(function) is types.FunctionType or _is_native(function):
            definition = pickler.dumps(function).head
            if len(definition) <= MOST_DEFINITION_BYTES:
                number = next(_numbers)
                if number <= MOST_FUNCTIONS:
                    numbered = Numbered(number, definition)
        _numbered[key] = (weakref.ref(function, lambda _: _numbered.pop(key, None)), numbered)
        return numbered


def _is_native(function: types.BuiltinFunctionType) -> bool:
    name = function.__name__
    return function is getattr(torch, name, None) or function is getattr(
        sys.modules.get(function.__module__), name, None
    )


class Told:
    """What numbers the callees know, at the caller."""

    def __init__(self) -> None:
        self._told: dict[int, set[int]] = {}

    def to(self, peer: int) -> set[int]:
        """Returns the numbers that a callee knows; to be added to once a definition is sent."""
        told = self._told.get(peer)
        return self._told.setdefault(peer, set()) if told is None else told

    def forget(self, peer: int) -> None:
        """Notes that a callee is gone, and what it knew; the set of ``to`` is void then."""
        self._told.pop(peer, None)


class Definitions:
    """What the numbers of the callers stand for, at the callee."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, _Definition]] = {}

    def learn(self, peer: int, number: int, definition: bytes) -> None:
        """Takes a definition of a caller; runs no code.

        Raises:
            ProtocolError: If the number is out of bounds, or the definition too long.
        """
        if not 0 < number <= MOST_FUNCTIONS or len(definition) > MOST_DEFINITION_BYTES:
            raise ProtocolError(
                f"function {number} is defined in {len(definition)} bytes; numbers go up to "
                f"{MOST_FUNCTIONS}, and a definition has at most {MOST_DEFINITION_BYTES} bytes"
            )
        self._known.setdefault(peer, {}).setdefault(number, _Definition(definition))

    def resolve(self, peer: int, number: int) -> Callable[..., Any]:
        """Returns the function that a caller means by a number.

        Raises:
            ProtocolError: If the caller has not defined it.
            ImportError: If the function cannot be imported here.
        """
        try:
            definition = self._known[peer][number]
        except KeyError:
            raise ProtocolError(
                f"a request calls function {number}, which is not defined"
            ) from None
        function: Callable[..., Any] = definition.function()
        return function

    def forget(self, peer: int) -> None:
        """Forgets the definitions of a caller that is gone."""
        self._known.pop(peer, None)


class _Definition:
    __slots__ = ("_function", "_name", "_namespace", "_pickle")

    def __init__(self, pickle: bytes) -> None:
        self._pickle = pickle
        self._function: Any = None
        self._namespace: dict[str, Any] = {}
        self._name = ""

    def function(self) -> Any:
        function = self._function
        # The module may have been reloaded, or the function replaced.
        if function is None or self._namespace.get(self._name) is not function:
            function = pickler.loads(self._pickle, ())
            name = getattr(function, "__qualname__", "")
            module = sys.modules.get(getattr(function, "__module__", None) or "")
            if module is not None and getattr(module, name, None) is function:
                self._namespace, self._name = vars(module), name
            else:  # of torch
                self._namespace, self._name = {name: function}, name
            self._function = function
        return function
