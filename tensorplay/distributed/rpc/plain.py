"""Payloads of plain values: numbers, texts, and tensors among them, without a pickler.

    (no frames)                          no values
    [values]                             scalars
    [values] [table] [buffer] ...        scalars and tensors

The first frame is a MessagePack array: of the positional values, with nil for each tensor,
and a map of the named ones. The table describes the tensors and tells their places among
the positional values. Whatever has more structure than that, or a type that MessagePack
would not give back as it was, is pickled; the first byte tells the two apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from tensorplay.distributed.rpc import buffers, tensors
from tensorplay.distributed.rpc.shm import Leases
from tensorplay.distributed.rpc.tensors import REQUIRES_GRAD, Descriptor, DeviceMap
from tensorplay.errors import ProtocolError, SerializationError

__all__ = ["Plain", "is_plain", "pack", "unpack", "unpack_result"]

Frame = bytes | memoryview
K = TypeVar("K")
V = TypeVar("V")

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_TENSOR = torch.Tensor
#: First byte of an array of two.
_PAIR = 0x92
#: Layouts of single tensors that are remembered, at either side.
_MOST_KNOWN = 4096


class Table(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Second frame of plain values with tensors.

    Attributes:
        tensors: The tensors.
        places: Where they belong among the positional values.
    """

    tensors: list[Descriptor]
    places: list[int]


class Plain(NamedTuple):
    """What ``pack`` returns.

    Attributes:
        frames: The payload.
        tensors: The tensors in it.
        leases: Memory in it that the receiver shares, if there may be any.
    """

    frames: Sequence[Frame]
    tensors: list[torch.Tensor]
    leases: Leases | None = None


_NOTHING: list[Frame] = []
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[list[Any], dict[str, Any]]).decode
_bytes_at = ctypes.string_at
_decode_table = msgspec.msgpack.Decoder(Table).decode


def pack(
    values: Sequence[Any],
    named: Mapping[str, Any],
    device_map: DeviceMap | None = None,
    leases_for: Callable[[], Leases | None] = lambda: None,
) -> Plain | None:
    """Returns the payload of values, or None if they are not plain.

    Args:
        values: The positional ones.
        named: The named ones; a tensor among them is not plain.
        device_map: Where tensors on devices of this process go.
        leases_for: Returns what gives memory that the receiver shares.
    """
    if not values and not named:
        return Plain(_NOTHING, [])
    found: list[torch.Tensor] = []
    places: list[int] = []
    for place, value in enumerate(values):
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is not _TENSOR or value.__dict__ or (found and _is_among(found, value)):
            return None
        found.append(value)
        places.append(place)
    for key, value in named.items():
        if type(value) not in _SCALARS or type(key) is not str:
            return None
    if found:
        values = list(values)
        for place in places:
            values[place] = None
    leases: Leases | None = None
    try:
        head = _encode((values, named))
        if not found:
            return Plain((head,), found)
        if len(found) == 1 and not device_map and (small := _pack_small(found[0], places)):
            return Plain((head, *small), found)
        leases = leases_for()
        descriptors, contents = tensors.encode(found, device_map=device_map, leases=leases)
    except (OverflowError, UnicodeEncodeError):  # a large integer, half a character
        return None
    except (SerializationError, RuntimeError):  # the pickler will tell which tensor it is
        if leases is not None:
            leases.undo()
        return None
    return Plain((head, _encode(Table(descriptors, places)), *contents), found, leases)


def _is_among(found: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
    return any(tensor is one for one in found)


def is_plain(frames: Sequence[Frame]) -> bool:
    """Returns whether a payload is one of ``pack``, not of the pickler."""
    return not frames or (len(frames[0]) > 0 and frames[0][0] == _PAIR)


def unpack(
    frames: Sequence[Frame],
    tensors_hook: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the positional and the named values of a payload.

    Args:
        frames: The payload.
        tensors_hook: Is shown the tensors; those that it returns take their place.

    Raises:
        ProtocolError: If the payload is damaged.
    """
    found: list[torch.Tensor] = []
    places: Sequence[int] = ()
    values: list[Any] = []
    named: dict[str, Any] = {}
    try:
        if frames:
            values, named = _decode(frames[0])
        if len(frames) > 1:
            found, places = _unpack_tensors(frames)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the values of a call are damaged: {error}") from None
    if tensors_hook is not None:
        found = tensors_hook(found)
    if not places:
        return values, named
    for place, tensor in zip(places, found, strict=True):
        if not 0 <= place < len(values):
            raise ProtocolError(f"a tensor belongs at place {place} of {len(values)} values")
        values[place] = tensor
    return values, named


def unpack_result(
    frames: Sequence[Frame],
    tensors_hook: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
) -> Any:
    """Returns the only value of a payload; see ``unpack``."""
    values, _ = unpack(frames, tensors_hook)
    if len(values) != 1:
        raise ProtocolError(f"a reply has 1 value, this one has {len(values)}")
    return values[0]


def _unpack_tensors(frames: Sequence[Frame]) -> tuple[list[torch.Tensor], Sequence[int]]:
    table = frames[1]
    known = _layouts.get(table) if type(table) is bytes else None
    if known is not None and len(frames) == 3 and not torch.is_inference_mode_enabled():
        return [known.tensor(frames[2])], known.places
    decoded = _decode_table(table)
    found = tensors.decode(decoded.tensors, frames[2:])
    if len(found) != len(decoded.places):
        raise ProtocolError(f"{len(found)} tensors belong at {len(decoded.places)} places")
    if type(table) is bytes and len(found) == 1 and _is_small(decoded.tensors[0], found[0]):
        _remember(_layouts, table, _Layout(found[0], decoded.places))
    return found, decoded.places


# A single small tensor: what is the same for all that are like it is worked out once.

_tables: dict[tuple[Any, ...], bytes] = {}


def _pack_small(tensor: torch.Tensor, places: list[int]) -> tuple[bytes, bytes] | None:
    """Returns table and buffer of a contiguous tensor in host memory, None for others."""
    if (
        tensor.layout is not torch.strided
        or not 0 < (nbytes := tensor.nbytes) <= buffers.SMALL_BYTES
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, *places)
    table = _tables.get(key)
    address = tensor.data_ptr()
    start = tensor.storage_offset() * tensor.itemsize
    if table is None or not address or start + nbytes > tensor.untyped_storage().nbytes():
        descriptors, _ = tensors.encode([tensor])  # raises if its memory was freed
        table = _encode(Table(descriptors, places))
        _remember(_tables, key, table)
    return table, _bytes_at(address, nbytes)


class _Layout:
    """What the table of a single small tensor says."""

    __slots__ = ("_count", "_dtype", "_nbytes", "_requires_grad", "_shape", "places")

    def __init__(self, tensor: torch.Tensor, places: list[int]) -> None:
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._count = tensor.numel()
        self._nbytes = tensor.nbytes
        self._requires_grad = tensor.requires_grad
        self.places = tuple(places)

    def tensor(self, buffer: Frame) -> torch.Tensor:
        """Returns the tensor whose elements are in a buffer."""
        if len(buffer) < self._nbytes:
            raise ProtocolError(
                f"a tensor of shape {list(self._shape)} needs {self._nbytes} bytes of a buffer "
                f"of {len(buffer)}"
            )
        # In place, so that autograd takes the tensor for no view.
        made = torch.frombuffer(bytearray(buffer), dtype=self._dtype, count=self._count)
        made.resize_(self._shape)
        return made.requires_grad_() if self._requires_grad else made


_layouts: dict[bytes, _Layout] = {}


def _is_small(descriptor: Descriptor, tensor: torch.Tensor) -> bool:
    return (
        descriptor.layout == "strided"
        and descriptor.device == "cpu"
        and descriptor.buffer == 0
        and descriptor.offset == 0
        and descriptor.flags in (0, REQUIRES_GRAD)
        and 0 < tensor.nbytes <= buffers.SMALL_BYTES
        and tensor.stride() == torch.empty(tensor.shape).stride()
    )


def _remember(known: dict[K, V], key: K, value: V) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = value
