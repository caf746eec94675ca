"""Names of ``torch.distributed.rpc.internal`` that scripts and tests touch."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from tensorplay.distributed.rpc import current, payload, pickler

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_log = logging.getLogger(__name__)


class RPCExecMode(Enum):
    """How a function is called."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments, as one object."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RemoteException(NamedTuple):
    """What ``_run_function`` returns for a function that raised."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """The pickler of calls, as an object."""

    def _register_reducer(self, obj_class: type, reducer: pickler.Reducer) -> None:
        """Has objects of a class and its subclasses pickled by ``reducer`` in calls."""
        pickler.register_reducer(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Returns the pickle of an object, and the tensors that it refers to."""
        exporter = pickler.current_exporter()
        pickled = pickler.dumps(obj, exporter=exporter, out_of_band=False)
        return pickled.head, pickled.tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Returns the object that ``serialize`` has pickled."""
        return pickler.loads(binary_data, tensor_table, importer=pickler.current_importer())


_internal_rpc_pickler = _InternalRPCPickler()

#: What calls of this process use in place of the library's own pickler.
_custom: payload.Pickler | None = None


def custom_pickler() -> payload.Pickler | None:
    """Returns the pickler that takes the place of the library's own, or None."""
    return _custom


def use_pickler(pickler: payload.Pickler) -> None:
    """Has calls of this process use a pickler; the library's own ends that."""
    global _custom
    _custom = None if pickler is _internal_rpc_pickler else pickler


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the pickle of an object, and the tensors that it refers to."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Returns the object that ``serialize`` has pickled."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _run_function(python_udf: PythonUDF) -> Any:
    """Returns what the function returns, or a ``RemoteException`` if it raises."""
    try:
        return python_udf.func(*python_udf.args, **(python_udf.kwargs or {}))
    except Exception as error:
        text = f"On {current.agent().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        _log.warning("%s", text)
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raises the exception that a result of ``_run_function`` stands for, if it is one.

    Raises:
        RuntimeError: If its class cannot be made from a text.
    """
    if not isinstance(result, RemoteException):
        return
    try:
        error = result.exception_type(result.msg)
    except BaseException as reason:
        raise RuntimeError(
            f"Failed to create original exception type: {reason}. "
            f"Original exception on remote side was {result.msg}"
        ) from reason
    raise error


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name under which a profiler shows a call."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> torch.autograd.profiler.record_function:
    """Returns a record of a call, begun; its ``__exit__`` ends it."""
    key = _build_rpc_profiling_key(exec_type, func_name, current_worker_name, dest_worker_name)
    record = torch.autograd.profiler.record_function(key)
    record.__enter__()  # type: ignore[no-untyped-call]
    return record
