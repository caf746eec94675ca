"""Reads pickles of those who are not trusted.

The unpickler of the standard library calls whatever is on its stack and sets attributes of
whatever is there, be it a class that all of the process uses.  This one looks at each of
these steps, which only the unpickler written in Python allows; it is slower for it.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from tensorplay.distributed.rpc import allow, plain_types
from tensorplay.distributed.rpc.allow import Guard
from tensorplay.errors import NotAllowedError, ProtocolError

__all__ = ["Reader"]

#: Deepest nesting of what C recurses into without a limit: tuples and frozen sets when they
#: are hashed, deques and default dicts when they are let go.
MOST_NESTED = 100
_DEEP = (collections.deque, collections.defaultdict)

_Base: Any = pickle._Unpickler


class Reader(_Base):  # type: ignore[misc]
    """Unpickles what a guard lets pass.

    Args:
        data: The pickle.
        buffers: Its out-of-band buffers.
        guard: Says what may be loaded.
        own: Resolves the names that the pickler itself stands in with, or returns None.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Base.dispatch)

    def __init__(
        self,
        data: bytes | memoryview,
        buffers: Any,
        guard: Guard,
        own: Callable[[str, str], Any],
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._length = len(data)
        self._guard = guard
        self._own = own
        self._stand_ins: list[Any] = []
        self._nested: dict[int, tuple[Any, int]] = {}

    def load(self) -> Any:
        """Returns the object.

        Raises:
            NotAllowedError: If anything in the pickle is not allowed.
            ProtocolError: If it is damaged.
        """
        try:
            return super().load()
        except NotAllowedError:
            raise
        except Exception as error:
            last = error.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            where = None if last is None else last.tb_frame.f_globals.get("__name__")
            if where in (pickle.__name__, __name__):
                raise ProtocolError(f"the pickle of a call is damaged: {error}") from None
            raise

    # Names.

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name stands for."""
        own = self._own(module, name)
        if own is not None:
            self._stand_ins.append(own)
            return own
        return self._guard.policy.find(module, name)

    def get_extension(self, code: int) -> None:
        """Refuses the registry of ``copyreg``: its names are cached, unseen."""
        self._guard.refuse(f"extension {code} of the pickler")

    def persistent_load(self, pid: Any) -> None:
        """Refuses: no pickle of a call has one."""
        self._guard.refuse("an object outside of the pickle")

    # Calls.

    def _check_call(self, function: Any, args: Any) -> None:
        if type(args) is not tuple:
            raise pickle.UnpicklingError("arguments that are no tuple")
        if any(function is one for one in self._stand_ins):
            return
        plain = plain_types.constructor(function, args)
        if plain is None and self._guard.policy.may_build(function):
            return
        if not plain:
            self._guard.refuse(f"a call of {allow._name(function)}")

    def load_reduce(self) -> None:
        """Calls a function."""
        self._check_call(self.stack[-2], self.stack[-1])
        super().load_reduce()
        made = self.stack[-1]
        if type(made) is collections.deque:
            self._limit_nesting(made, made)

    def _check_class(self, cls: Any, args: Any) -> None:
        if type(args) is not tuple:
            raise pickle.UnpicklingError("arguments that are no tuple")
        if not isinstance(cls, type) or not self._guard.policy.may_build(cls):
            self._guard.refuse(f"an object of {allow._name(cls)}")

    def load_newobj(self) -> None:
        """Makes an object without its constructor."""
        self._check_class(self.stack[-2], self.stack[-1])
        super().load_newobj()

    def load_newobj_ex(self) -> None:
        """Makes an object without its constructor."""
        self._check_class(self.stack[-3], self.stack[-2])
        super().load_newobj_ex()

    def _instantiate(self, klass: Any, args: Any) -> None:
        self._check_call(klass, tuple(args))
        super()._instantiate(klass, args)

    # State.

    def load_build(self) -> None:
        """Sets the state of an object."""
        state, obj = self.stack[-1], self.stack[-2]
        if not self._guard.policy.may_fill(obj):
            self._guard.refuse(f"the state of {allow._name(obj)}")
        own = hasattr(obj, "__setstate__")  # code of its class, which is allowed
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                for name in dict.__iter__(part):
                    if isinstance(name, str) and name.startswith("__") and name != "__notes__":
                        self._guard.refuse(f"the attribute {name!r} of {allow._name(obj)}")
            elif part is not None and not own:
                raise pickle.UnpicklingError("a state that is no dict")
        super().load_build()

    def _check_items(self, obj: Any, items: Iterable[Any]) -> None:
        if type(obj) in _DEEP:
            self._limit_nesting(obj, items)
        of_class = isinstance(obj, (list, dict, set)) and self._guard.policy.covers(type(obj))
        if not plain_types.has_items(obj) and not of_class:
            self._guard.refuse(f"the items of {allow._name(obj)}")

    def load_append(self) -> None:
        """Adds an item."""
        self._check_items(self.stack[-2], self.stack[-1:])
        super().load_append()

    def load_appends(self) -> None:
        """Adds items."""
        self._check_items(self.metastack[-1][-1], self.stack)
        super().load_appends()

    def load_additems(self) -> None:
        """Adds items to a set."""
        self._check_items(self.metastack[-1][-1], self.stack)
        super().load_additems()

    def load_setitem(self) -> None:
        """Sets an item."""
        self._check_items(self.stack[-3], self.stack[-1:])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Sets items."""
        self._check_items(self.metastack[-1][-1], self.stack[1::2])
        super().load_setitems()

    # Bombs.

    def load_bytearray8(self) -> None:
        """Makes a bytearray, of no more than there is."""
        size = int.from_bytes(self.read(8), "little")
        if size > self._length:
            raise pickle.UnpicklingError(f"{size} bytes are announced")
        self.append(bytearray(self.read(size)))

    def _limit_nesting(self, made: Any, items: Iterable[Any]) -> None:
        nested = self._nested  # holds the objects, so that no other gets the id of one
        depth = 1 + max((nested[id(one)][1] for one in items if id(one) in nested), default=0)
        if depth > MOST_NESTED:
            raise pickle.UnpicklingError(f"containers are nested deeper than {MOST_NESTED}")
        nested[id(made)] = made, max(depth, nested.get(id(made), (None, 0))[1])

    def _limit_made(self) -> None:
        self._limit_nesting(self.stack[-1], self.stack[-1])

    def load_tuple(self) -> None:
        """Makes a tuple."""
        super().load_tuple()
        self._limit_made()

    def load_tuple1(self) -> None:
        """Makes a tuple."""
        super().load_tuple1()
        self._limit_made()

    def load_tuple2(self) -> None:
        """Makes a tuple."""
        super().load_tuple2()
        self._limit_made()

    def load_tuple3(self) -> None:
        """Makes a tuple."""
        super().load_tuple3()
        self._limit_made()

    def load_frozenset(self) -> None:
        """Makes a frozen set."""
        super().load_frozenset()
        self._limit_made()

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.ADDITEMS[0]: load_additems,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        pickle.TUPLE[0]: load_tuple,
        pickle.TUPLE1[0]: load_tuple1,
        pickle.TUPLE2[0]: load_tuple2,
        pickle.TUPLE3[0]: load_tuple3,
        pickle.FROZENSET[0]: load_frozenset,
    }
