"""Names of ``torch.distributed.rpc.internal`` that scripts and tests touch."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from tensorplay.distributed.rpc import pickler

__all__ = ["PythonUDF", "RPCExecMode", "deserialize", "serialize"]


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


class _InternalRPCPickler:
    """The pickler of calls, as an object."""

    def _register_reducer(self, obj_class: type, reducer: pickler.Reducer) -> None:
        """Has objects of a class and its subclasses pickled by ``reducer`` in calls."""
        pickler.register_reducer(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Returns the pickle of an object, and the tensors that it refers to."""
        head, tensors, buffers = pickler.dumps(obj, exporter=pickler.current_exporter())
        if buffers:  # two results, as in torch: the buffers go into the stream
            return _with_buffers(head, [bytes(buffer.raw()) for buffer in buffers]), tensors
        return head, tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Returns the object that ``serialize`` has pickled."""
        importer = pickler.current_importer()
        head, buffers = _split(binary_data)
        return pickler.loads(head, tensor_table, buffers, importer=importer)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the pickle of an object, and the tensors that it refers to."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Returns the object that ``serialize`` has pickled."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


_MARK = b"buffers:"


def _with_buffers(head: bytes, buffers: list[bytes]) -> bytes:
    import msgspec

    return _MARK + msgspec.msgpack.encode((head, buffers))


def _split(data: bytes) -> tuple[bytes, list[bytearray]]:
    import msgspec

    if not data.startswith(_MARK):
        return data, []
    head, buffers = msgspec.msgpack.decode(data[len(_MARK) :], type=tuple[bytes, list[bytes]])
    return head, [bytearray(buffer) for buffer in buffers]


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name under which a profiler shows a call."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
