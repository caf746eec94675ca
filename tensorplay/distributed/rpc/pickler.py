"""Objects to bytes and back, for calls.

Pickle protocol 5 with out-of-band buffers. Functions and classes go by reference where the
receiver can import them, else by value (cloudpickle). Tensors are left out: the stream refers
to them by number, and they are listed apart, so that they travel without being copied into the
stream and autograd can look at them. A tensor that occurs twice is listed once.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import cloudpickle
import torch

from tensorplay.distributed.rpc import allow, culprit, restricted
from tensorplay.errors import (
    CodeNotFoundError,
    ProtocolError,
    SerializationError,
    TensorPlayError,
)

Reducer: TypeAlias = Callable[[Any], tuple[Any, ...]]

#: Tensors of exactly these types are entries of the tensor table; the others are taken apart.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: How tensors are pickled whose class does not say otherwise.
_USUAL = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)

#: Stands for the name of a file where cloudpickle leaves it out.
_NO_FILE = "<dynamic-code>"

_reducers: dict[type, Reducer] = {}
_found: dict[type, Reducer | None] = {}
_running = threading.local()


class Pickled(NamedTuple):
    """What ``dumps`` returns.

    Attributes:
        head: The pickle stream.
        tensors: The tensors it refers to, in order.
        buffers: The out-of-band buffers, in order.
        copies: Positions of the tensors that are parameters of a module in it: what arrives is
            a copy of the module, with parameters of its own.
    """

    head: bytes
    tensors: list[torch.Tensor]
    buffers: list[pickle.PickleBuffer]
    copies: frozenset[int]


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Has objects of ``cls`` and its subclasses pickled by ``reducer`` in calls.

    Args:
        cls: The class.
        reducer: Takes an object and returns what ``__reduce__`` would.
    """
    _reducers[cls] = reducer
    _found.clear()


def dumps(obj: Any, *, exporter: Any = None, out_of_band: bool = True) -> Pickled:
    """Returns the pickle of an object and the tensors in it.

    Args:
        obj: What is to travel.
        exporter: Counts the remote references in it.
        out_of_band: Whether the buffers of NumPy arrays and the like stay out of the stream.

    Raises:
        SerializationError: If a part of it cannot travel; the text names the part.
    """
    try:
        return _dumps(obj, exporter, out_of_band)
    except Exception as error:
        if isinstance(error, MemoryError) or (
            isinstance(error, TensorPlayError) and not isinstance(error, SerializationError)
        ):
            raise
        name_culprit(obj, error, exporter=exporter)


def name_culprit(
    obj: Any,
    error: Exception,
    check: Callable[[list[torch.Tensor]], object] = len,
    *,
    exporter: Any = None,
) -> NoReturn:
    """Raises an error that names the part of an object which cannot travel.

    Args:
        obj: The object.
        error: Why it cannot.
        check: Raises if one of some tensors cannot travel.
        exporter: Counts the remote references in it.

    Raises:
        SerializationError: Always.
    """
    text = culprit.describe(obj, error, lambda part: check(_dumps(part, exporter).tensors))
    raise SerializationError(text) from error


def _dumps(obj: Any, exporter: Any, out_of_band: bool = True) -> Pickled:
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    writer = _Writer(file, buffers.append if out_of_band else None)
    before = current_exporter()
    _running.exporter = exporter
    try:
        writer.dump(obj)
    finally:
        _running.exporter = before
    return Pickled(file.getvalue(), writer.tensors, buffers, writer.copies)


def loads(
    head: bytes | memoryview,
    tensors: Sequence[torch.Tensor],
    buffers: Sequence[Any] = (),
    *,
    importer: Any = None,
) -> Any:
    """Returns the object that ``dumps`` has pickled.

    Args:
        head: The pickle stream.
        tensors: The tensors it refers to.
        buffers: The out-of-band buffers.
        importer: Restores the remote references in it.

    Raises:
        ImportError: If something in it cannot be imported here; the text says what to do.
        CodeNotFoundError: If a module that is here lacks something in it.
        NotAllowedError: If something in it is not allowed by the guard of this thread.
        ProtocolError: If the stream is damaged.
    """
    before = current_importer()
    _running.importer = importer
    guard = allow.current()
    try:
        if guard is not None:
            return restricted.Reader(head, buffers, guard, _stand_ins(tensors)).load()
        return _Reader(io.BytesIO(head), tensors, buffers).load()
    except (pickle.UnpicklingError, EOFError) as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # not of the stream, but of what it had called
        raise ProtocolError(f"the pickle of a call is damaged: {error}") from error
    finally:
        _running.importer = before


def current_exporter() -> Any:
    """Returns the exporter of the pickling that runs in this thread, or None."""
    return getattr(_running, "exporter", None)


def current_importer() -> Any:
    """Returns the importer of the unpickling that runs in this thread, or None."""
    return getattr(_running, "importer", None)


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles, and lists the tensors that it meets."""

    def __init__(
        self, file: io.BytesIO, keep: Callable[[pickle.PickleBuffer], object] | None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._owned: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return self._tensor(obj)
        if obj is _tensor_at:
            return NotImplemented
        if isinstance(obj, torch.nn.Module):
            self._owned.update(map(id, obj._parameters.values()))
        reducer = _found[kind] if kind in _found else _find_reducer(kind)
        if reducer is not None:
            return reducer(obj)
        if issubclass(kind, torch.Tensor):
            return _take_apart(obj)
        if kind is types.FunctionType:
            return NotImplemented if is_importable(obj) else self._function_reduce(obj)
        if kind is types.CodeType:
            return _code(obj)
        if kind is types.BuiltinFunctionType and obj == getattr(torch, obj.__name__, None):
            return _native, (obj.__name__,)
        if kind is types.MethodType and isinstance(obj.__self__, type):
            # A class method; cloudpickle would look for the function behind it and not find it.
            return _class_method, (obj.__self__, obj.__name__)
        return super().reducer_override(obj)

    @property
    def copies(self) -> frozenset[int]:
        """Positions of the tensors that are parameters of a module that was pickled."""
        if not self._owned:
            return frozenset()
        numbers = self._numbers
        return frozenset(numbers[one] for one in self._owned if one in numbers)

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        attributes = tensor.__dict__
        if attributes:
            return _tensor_at, (number,), dict(attributes), None, None, _set_attributes
        return _tensor_at, (number,)


class _Reader(pickle.Unpickler):
    """Unpickles, and puts the listed tensors in; the one place where names are resolved."""

    def __init__(
        self, file: io.BytesIO, tensors: Sequence[torch.Tensor], buffers: Sequence[Any]
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if name == _tensor_at.__name__ and module == __name__:
            # No bound method: the unpickler remembers it, and a cycle would keep the tensors.
            return functools.partial(_listed, self._tensors)
        if name == "subimport" and module.startswith("cloudpickle."):
            return _import  # of a module that a function uses which is sent by value
        try:
            return super().find_class(module, name)
        except ModuleNotFoundError as error:
            raise _not_importable(f"{module}.{name} was sent by reference", error) from error
        except AttributeError as error:
            raise CodeNotFoundError(
                "RPC pickler does not serialize the code of importable modules: "
                f"{module}.{name} was sent by name, and the module here does not have it "
                f"({error}); the processes run different versions of it"
            ) from error


def _stand_ins(tensors: Sequence[torch.Tensor]) -> Callable[[str, str], Any]:
    """Returns what resolves the names that stand for what is not in the stream."""

    def find(module: str, name: str) -> Any:
        if name == _tensor_at.__name__ and module == __name__:
            return functools.partial(_listed, tensors)
        return None

    return find


def _listed(tensors: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    if not 0 <= number < len(tensors):
        raise ProtocolError(f"a pickle refers to tensor {number} of {len(tensors)}")
    return tensors[number]


def _tensor_at(number: int) -> torch.Tensor:
    """Stands in the stream for a tensor; ``_Reader`` puts the tensor in its place."""
    raise SerializationError("a pickle of a call can only be read by the RPC unpickler")


def is_importable(function: types.FunctionType) -> bool:
    """Returns whether a function goes by reference; of most, this is less work than cloudpickle's.

    False means that it may: as a function inside of a class, or while modules are registered to
    go by value.
    """
    name = function.__module__
    return (
        name != "__main__"
        and getattr(sys.modules.get(name), function.__qualname__, None) is function
        and not cloudpickle.list_registry_pickle_by_value()
    )


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """Reduces code with the name of its file, by which a traceback finds the lines.

    cloudpickle may leave it out, and the caller of a function of a notebook would not see where
    it has raised.
    """
    make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if part == _NO_FILE else part for part in parts)


@allow.wire_safe(builds=True, calls=False)
def _native(name: str) -> Any:
    return allow.torch_function(name)


@allow.wire_safe(builds=True, calls=False)
def _class_method(cls: type, name: str) -> Any:
    allow.check_method(cls, name)
    return getattr(cls, name)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _not_importable(f"what was sent uses the module {name}", error) from error


def _not_importable(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{error}: {what}, which cannot be imported here; install the module, put it on the "
        "receiver's sys.path (PYTHONPATH, or the worker's option --import), or send it by value "
        "with cloudpickle.register_pickle_by_value",
        name=error.name,
    )


def _find_reducer(kind: type) -> Reducer | None:
    reducer = next((_reducers[cls] for cls in kind.__mro__ if cls in _reducers), None)
    _found[kind] = reducer
    return reducer


def _take_apart(tensor: torch.Tensor) -> Any:
    """Reduces a tensor of a subclass to plain tensors, or as its class says."""
    cls = type(tensor)
    if isinstance(tensor, torch._subclasses.FakeTensor):
        raise SerializationError("a fake tensor has no values that could be sent")
    if cls.__reduce_ex__ not in _USUAL:
        return NotImplemented
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        return _unflatten, (cls, inner, context, tuple(tensor.size()), tuple(tensor.stride()))
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(torch.Tensor)
        if tensor.is_leaf:
            plain = plain.detach().requires_grad_(tensor.requires_grad)
    state = dict(tensor.__dict__)
    return _as_subclass, (cls, plain), state, None, None, _set_attributes


@allow.wire_safe(builds=True, calls=False)
def _unflatten(
    cls: Any, inner: dict[str, Any], context: Any, size: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    allow.check_class(cls, torch.Tensor)
    return cls.__tensor_unflatten__(inner, context, size, stride)


@allow.wire_safe(builds=True, calls=False)
def _as_subclass(cls: Any, plain: torch.Tensor) -> torch.Tensor:
    allow.check_class(cls, torch.Tensor)
    if plain.is_leaf:  # and so is what it becomes
        made: torch.Tensor = torch.Tensor._make_subclass(cls, plain.detach(), plain.requires_grad)
    else:
        made = plain.as_subclass(cls)
    return made


@allow.wire_safe(builds=True, calls=False)
def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ProtocolError(f"attributes of a tensor for a {type(tensor).__qualname__}")
    tensor.__dict__.update(attributes)


def _reduce_script_function(function: Any) -> tuple[Any, ...]:
    """Sends a script function by its name where it has one, else as what it compiles to."""
    module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    if getattr(sys.modules.get(module), name, None) is function:
        return getattr, (sys.modules[module], name)
    file = io.BytesIO()
    torch.jit.save(function, file)
    return _load_script, (file.getvalue(),)


def _load_script(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


def _reduce_operator(operator: torch._ops.OpOverload[..., Any]) -> tuple[Any, ...]:
    return getattr, (operator.overloadpacket, operator._overloadname)


def _reduce_operators(packet: torch._ops.OpOverloadPacket[..., Any]) -> tuple[Any, ...]:
    return _operators, tuple(packet._qualified_op_name.split("::"))


def _operators(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name)


register_reducer(torch.jit.ScriptFunction, _reduce_script_function)
register_reducer(torch._ops.OpOverload, _reduce_operator)
register_reducer(torch._ops.OpOverloadPacket, _reduce_operators)
