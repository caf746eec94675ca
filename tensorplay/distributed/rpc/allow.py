"""What may be loaded from others, in a process that does not trust them.

Unpickling runs code: whoever chooses what is called, and with what, can do what the process
can. A ``Policy`` resolves the names in a pickle to these things and no others:

    plain values      numbers, texts, containers, tensors, and what describes tensors
    the library's own the functions and classes that are decorated with ``wire_safe``
    what is allowed   public functions and classes *defined in* the modules that are named

The ``Guard`` that runs in a thread says which policy holds there, and who has sent what is
being loaded.  ``restricted.Reader`` asks it for each name, and before each call.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from tensorplay.distributed.rpc import plain_types
from tensorplay.errors import ConfigError, NotAllowedError

__all__ = ["Guard", "Policy", "check_callable", "check_method", "current", "guarding", "wire_safe"]

T = TypeVar("T")

#: What gives whoever may use it everything else. These and what is below them are refused.
_TOO_MUCH = frozenset(
    (
        *("builtins", "cloudpickle", "code", "codeop", "copyreg", "ctypes", "dill", "functools"),
        *("gc", "importlib", "inspect", "io", "itertools", "joblib", "marshal"),
        *("multiprocessing", "numpy", "operator", "os", "pathlib", "pickle", "pkgutil", "posix"),
        *("pty", "runpy", "shutil", "signal", "socket", "subprocess", "sys", "tempfile"),
        *("tensorplay", "threading", "timeit", "types", "unittest", "weakref", "zipimport"),
    )
)
#: What of torch may be allowed as a whole: the rest can load files, compile and run code.
_OF_TORCH = ("torch.nn", "torch.optim")
#: Of these, only subclasses of one of these classes are, and functions of these modules:
#: torch.nn has helpers that get attributes by name, and hooks of all modules of a process.
_CLASSES_OF_TORCH = (
    torch.nn.Module,
    torch.Tensor,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
)
_FUNCTIONS_OF_TORCH = ("torch.nn.functional", "torch.nn.init")
#: What runs the compiler, whose options can name programs to run.
_DENIED = ("torch.nn.modules.module.Module.compile",)


class _Safe(NamedTuple):
    """What a function of the library may be used for by others.

    Attributes:
        obj: The function or class.
        builds: Whether a pickle may call it to build an object.
        calls: Whether a request may call it.
        gradients: Whether that is part of a backward pass of a call made before.
        vets: Positions of its arguments that it will call.
    """

    obj: Any
    builds: bool
    calls: bool
    gradients: bool
    vets: tuple[int, ...]


_safe: dict[tuple[str, str], _Safe] = {}
_local = threading.local()


def wire_safe(
    *,
    builds: bool = False,
    calls: bool = True,
    gradients: bool = False,
    vets: tuple[int, ...] = (),
) -> Callable[[T], T]:
    """Marks a function or class of the library as safe to name for whoever may send.

    It must not look up what its arguments name, nor call what is among them, unless it asks
    ``check_method`` or says so in ``vets``.

    Args:
        builds: Whether a pickle may call it to build an object.
        calls: Whether a request may call it.
        gradients: Whether it serves the backward of calls, and no other purpose.
        vets: Positions of its arguments that it calls: only what is allowed may stand there.
    """

    def mark(obj: T) -> T:
        found: Any = obj
        _safe[found.__module__, found.__qualname__] = _Safe(found, builds, calls, gradients, vets)
        return obj

    return mark


class Policy:
    """The names that others may use.

    Args:
        entries: Modules, each with what is below it, and classes and functions by their full
            names. They are imported.

    Raises:
        ConfigError: If one cannot be imported, or would allow everything.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self.entries = tuple(entries)
        self._modules: list[str] = []
        self._objects: dict[str, Any] = {}
        for entry in self.entries:
            self._enter(entry)

    def __repr__(self) -> str:
        return f"Policy({list(self.entries)!r})"

    def _enter(self, entry: str) -> None:
        top = entry.partition(".")[0]
        if not all(part.isidentifier() for part in entry.split(".")):
            raise ConfigError(f"cannot allow {entry!r}: it is no name of a module")
        if top in _TOO_MUCH:
            raise ConfigError(
                f"allowing {entry!r} would allow everything: who may use {top} can run any code; "
                "allow modules that are made to be called by others"
            )
        try:
            found: Any = importlib.import_module(entry)
        except ModuleNotFoundError as error:
            parent, _, name = entry.rpartition(".")
            if error.name is None or not parent or not f"{entry}.".startswith(f"{error.name}."):
                raise ConfigError(f"cannot allow {entry!r}: {error}") from error
            self._objects[entry] = _object(entry, parent, name)
            return
        except (ImportError, ValueError) as error:
            raise ConfigError(f"cannot allow {entry!r}: {error}") from error
        if top == "torch" and not _within(entry, _OF_TORCH):
            raise ConfigError(
                f"allowing all of {entry!r} would allow everything: torch loads files, and "
                f"compiles and runs code; allow {', '.join(_OF_TORCH)}, or single functions "
                "such as torch.add"
            )
        assert isinstance(found, types.ModuleType)
        self._modules.append(entry)

    def find(self, module: str, name: str) -> Any:
        """Returns what a name in a pickle stands for.

        Raises:
            NotAllowedError: If it is not allowed.
        """
        safe = _safe.get((module, name))
        if safe is not None:
            return safe.obj
        found = plain_types.find(module, name)
        if found is not None:
            return found
        if module.partition(".")[0] == "cloudpickle":
            refuse(f"code that was sent by value ({module}.{name})")
        return self._find_allowed(module, name)

    def _find_allowed(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._objects:
            return self._objects[full]
        if not (_within(module, self._modules) or _within(full, self._objects)):
            refuse(full)
        # Nothing is imported for somebody else: importing runs code, too.
        found: Any = sys.modules.get(module)
        if found is None:
            refuse(full, f"; the module {module} is allowed, but not imported here")
        for part in name.split("."):
            # From modules to what they define, from classes to what they define: never from
            # a module to another that it has imported, nor by an attribute of an object.
            if not isinstance(found, type) and found is not sys.modules.get(module):
                refuse(full)
            found = vars(found).get(part)
        if isinstance(found, staticmethod):
            found = found.__func__
        if not isinstance(found, (type, types.FunctionType)) or not self.covers(found):
            refuse(full)
        return found

    def covers(self, obj: type | types.FunctionType) -> bool:
        """Returns whether a class or function is one of those that are allowed."""
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            return False
        full = f"{module}.{name}"
        if full in self._objects:
            return True
        if isinstance(obj, type):
            if issubclass(obj, type):
                return False
        elif name.rpartition(".")[2].startswith("_") or full in _DENIED:
            return False
        if _within(module, ("torch",)):
            if isinstance(obj, type):
                if not issubclass(obj, _CLASSES_OF_TORCH):
                    return False
            elif module not in _FUNCTIONS_OF_TORCH:
                return False
        return _within(module, self._modules) or _within(full, self._objects)

    def may_call(self, obj: Any) -> bool:
        """Returns whether others may have this process call an object."""
        if isinstance(obj, (type, types.FunctionType)):
            return self.covers(obj)
        if isinstance(obj, types.MethodType):
            owner = obj.__self__
            return self.may_use(owner, obj.__name__)
        if isinstance(obj, types.BuiltinFunctionType):
            return any(obj is one for one in self._objects.values())
        return self.covers(type(obj)) and callable(obj)

    def may_use(self, owner: Any, method: str) -> bool:
        """Returns whether others may call a method of an object, or of a class."""
        cls = owner if isinstance(owner, type) else type(owner)
        if not self.covers(cls) or (method.startswith("_") and method != "__call__"):
            return False
        try:
            found = inspect.getattr_static(cls, method)
        except AttributeError:
            return False
        if isinstance(found, types.FunctionType) and (
            f"{found.__module__}.{found.__qualname__}" in _DENIED
        ):
            return False
        functions = (types.FunctionType, types.MethodDescriptorType)
        if isinstance(owner, type):
            return isinstance(found, (classmethod, staticmethod))
        return isinstance(found, (classmethod, staticmethod, *functions))

    def may_build(self, obj: Any) -> bool:
        """Returns whether a pickle may call an object to build another."""
        safe = _registered(obj)
        return safe.builds if safe is not None else self.may_call(obj)

    def may_fill(self, obj: Any) -> bool:
        """Returns whether a pickle may set the state of an object that it has built."""
        cls = type(obj)
        if isinstance(obj, (type, types.FunctionType, types.MethodType, types.ModuleType)):
            return False
        safe = _safe.get((cls.__module__, cls.__qualname__))
        if safe is not None and safe.obj is cls:
            return safe.builds
        return plain_types.has_state(cls) or self.covers(cls)


@dataclass(frozen=True)
class Guard:
    """The policy that holds for what a peer has sent.

    Attributes:
        policy: What may be loaded.
        sender: Name of the peer.
        violated: Called when something is refused.
        gradients_only: Whether the peer may call nothing but what serves a backward pass.
    """

    policy: Policy
    sender: str
    violated: Callable[[], None] = lambda: None
    gradients_only: bool = False

    def check_request(self, function: Any, args: Any, kwargs: Any) -> None:
        """Checks what a request calls.

        Raises:
            NotAllowedError: If it may not.
        """
        safe = _registered(function)
        if self.gradients_only and not (safe is not None and safe.gradients):
            self.refuse(f"a call of {_name(function)}")
        if safe is None:
            if not self.policy.may_call(function):
                self.refuse(f"a call of {_name(function)}")
            return
        if not safe.calls:
            self.refuse(f"a call of {_name(function)}")
        if safe.vets and (kwargs or type(kwargs) is not dict or type(args) is not tuple):
            self.refuse(f"a call of {_name(function)} with arguments by name")
        for position in safe.vets:
            if position < len(args) and not self.policy.may_call(args[position]):
                self.refuse(f"a call of {_name(args[position])}")

    def refuse(self, what: str, why: str = "") -> NoReturn:
        """Refuses what the sender has asked for, and counts it.

        Raises:
            NotAllowedError: Always.
        """
        self.violated()
        asked = f"{what} was asked for by {self.sender!r} and refused"
        if self.gradients_only:
            raise NotAllowedError(f"{asked}: their keys allow no calls from there to here")
        entries = ", ".join(self.policy.entries)
        allowed = f"{entries} beside plain values" if entries else "nothing but plain values"
        raise NotAllowedError(f"{asked}: this process loads {allowed} (its option allow){why}")


def current() -> Guard | None:
    """Returns the guard of what is loaded in this thread, or None if everything may be."""
    return getattr(_local, "guard", None)


@contextmanager
def guarding(guard: Guard | None) -> Iterator[None]:
    """Has a guard hold in this thread for a while; None lets everything be loaded."""
    before = current()
    _local.guard = guard
    try:
        yield
    finally:
        _local.guard = before


def check_callable(obj: Any) -> None:
    """Checks that an object which others have sent may be called.

    Raises:
        NotAllowedError: If it may not.
    """
    guard = current()
    if guard is not None and not guard.policy.may_call(obj):
        refuse(f"a call of {_name(obj)}")


def check_method(owner: Any, name: str) -> None:
    """Checks that a method which others have named may be called.

    Raises:
        NotAllowedError: If it may not.
    """
    guard = current()
    if guard is not None and not guard.policy.may_use(owner, name):
        cls = owner if isinstance(owner, type) else type(owner)
        refuse(f"the method {name!r} of {cls.__module__}.{cls.__qualname__}")


def check_class(cls: Any, base: type) -> None:
    """Checks that a class which others have named may be used.

    Raises:
        NotAllowedError: If it may not.
    """
    guard = current()
    if guard is None:
        return
    if not (isinstance(cls, type) and issubclass(cls, base)) or not (
        _registered(cls) or guard.policy.covers(cls)
    ):
        refuse(_name(cls))


def check_sender(name: str) -> None:
    """Checks that a name which others have given is that of the sender.

    Raises:
        NotAllowedError: If it is not.
    """
    guard = current()
    if guard is not None and guard.sender != name:
        refuse(f"a message in the name of {name!r}")


def refuse(what: str, why: str = "") -> NoReturn:
    """Refuses what the sender of what is being loaded has asked for.

    Raises:
        NotAllowedError: Always.
    """
    guard = current()
    if guard is not None:
        guard.refuse(what, why)
    raise NotAllowedError(f"{what} is not allowed{why}")


def _object(entry: str, parent: str, name: str) -> Any:
    """Returns the class or function that an entry names."""
    try:
        found = vars(importlib.import_module(parent)).get(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot allow {entry!r}: {error}") from error
    kinds = (type, types.FunctionType, types.BuiltinFunctionType)
    if not isinstance(found, kinds) or (isinstance(found, type) and issubclass(found, type)):
        raise ConfigError(
            f"cannot allow {entry!r}: there is no such module, nor a class or function of that "
            f"name in {parent}"
        )
    return found


def _within(name: str, entries: Iterable[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in entries)


def _registered(obj: Any) -> _Safe | None:
    """Returns what is registered of an object of the library."""
    key = (getattr(obj, "__module__", None), getattr(obj, "__qualname__", None))
    try:
        safe = _safe.get(key)  # type: ignore[arg-type]
    except TypeError:  # not hashable: somebody else's object
        return None
    return safe if safe is not None and safe.obj is obj else None


def _name(obj: Any) -> str:
    named = obj if isinstance(obj, (type, types.FunctionType, types.MethodType)) else type(obj)
    return f"{named.__module__}.{named.__qualname__}"


def torch_function(name: str) -> Any:
    """Returns a native function of torch by name, for what it was sent as.

    Raises:
        NotAllowedError: If it is not allowed.
    """
    guard = current()
    if guard is not None:
        return guard.policy._find_allowed("torch", name)
    return getattr(torch, name)
