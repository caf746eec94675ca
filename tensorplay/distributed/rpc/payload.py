"""The payload of a request or reply: an object to frames, and back.

    [pickle] [table] [buffer] [buffer] ...

The table is a MessagePack struct: the descriptors of the tensors that the pickle refers to,
whose buffers come first, and the number of the pickle's own out-of-band buffers, which come
last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from tensorplay.distributed.rpc import allow, buffers, pickler, tensors
from tensorplay.distributed.rpc.buffers import allocate
from tensorplay.distributed.rpc.shm import Leases
from tensorplay.distributed.rpc.tensors import Descriptor
from tensorplay.errors import NotAllowedError, ProtocolError, SerializationError

__all__ = ["Pickler", "Table", "allocate", "device_map", "inverse", "pack", "unpack"]

Frame = bytes | memoryview
#: Sees the tensors of a payload, and the positions of those that travel as copies.
PackHook = Callable[[list[torch.Tensor], frozenset[int]], None]
#: Sees the tensors of a payload and returns those to use in their place.
UnpackHook = Callable[[list[torch.Tensor]], list[torch.Tensor]]

_encoder = msgspec.msgpack.Encoder()


class Table(msgspec.Struct, frozen=True, array_like=True):
    """Second frame of a payload.

    Attributes:
        tensors: The tensors, in the order in which the pickle counts them.
        buffers: How many of the frames at the end are the pickle's own.
    """

    tensors: list[Descriptor] = []
    buffers: int = 0


class Pickler(Protocol):
    """What can take the place of the library's own pickler, as in ``_use_rpc_pickler``."""

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Returns the pickle of an object and the tensors in it."""

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Returns the object."""


_table_decoder = msgspec.msgpack.Decoder(Table)
_EMPTY_TABLE = _encoder.encode(Table())


def pack(
    obj: Any,
    *,
    exporter: Any = None,
    device_map: Mapping[torch.device, torch.device] | None = None,
    tensors_hook: PackHook | None = None,
    custom: Pickler | None = None,
    leases: Leases | None = None,
) -> list[Frame]:
    """Returns the frames of an object.

    Args:
        obj: What is to travel.
        exporter: Counts the remote references in it.
        device_map: Where tensors on devices of this process go.
        tensors_hook: Is shown the tensors.
        custom: A pickler to use instead of the library's own.
        leases: Gives memory that the receiver shares.

    Raises:
        SerializationError: If a part of it cannot travel.
    """
    own: Sequence[Any]
    copies: frozenset[int]
    if custom is not None:
        head, found = custom.serialize(obj)
        own, copies = (), frozenset()
    else:
        head, found, own, copies = pickler.dumps(obj, exporter=exporter)
    if tensors_hook is not None:
        tensors_hook(found, copies)
    if not found and not own:
        return [head, _EMPTY_TABLE]
    try:
        descriptors, contents = tensors.encode(found, device_map=device_map, leases=leases)
    except SerializationError as error:
        if custom is None:
            pickler.name_culprit(obj, error, tensors.check, exporter=exporter)
        raise
    table = _encoder.encode(Table(descriptors, len(own)))
    return [head, table, *contents, *(buffers.copied(buffer.raw(), leases) for buffer in own)]


def unpack(
    frames: Sequence[Frame],
    *,
    importer: Any = None,
    tensors_hook: UnpackHook | None = None,
    custom: Pickler | None = None,
) -> Any:
    """Returns the object that frames of ``pack`` stand for.

    Args:
        frames: The frames.
        importer: Restores the remote references in it.
        tensors_hook: Is shown the tensors; those that it returns take their place.
        custom: The counterpart of the pickler that packed it.

    Raises:
        ProtocolError: If the frames are none of a payload.
    """
    if len(frames) < 2:
        raise ProtocolError(f"a payload has at least 2 frames, this one has {len(frames)}")
    try:
        table = _table_decoder.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the second frame of a payload is no table: {error}") from None
    contents = frames[2:]
    if not 0 <= table.buffers <= len(contents):
        raise ProtocolError(f"a payload announces {table.buffers} buffers of {len(contents)}")
    first_own = len(contents) - table.buffers
    found = tensors.decode(table.tensors, contents[:first_own])
    if tensors_hook is not None:
        found = tensors_hook(found)
    if custom is not None:
        if allow.current() is not None:
            raise NotAllowedError(
                "a pickler of one's own loads whatever it likes; with the option allow, leave "
                "_use_rpc_pickler alone"
            )
        return custom.deserialize(bytes(frames[0]), found)
    # Writable, as the sender's may have been; the pickle tells which were not.
    own = [buffers.writable(buffer) for buffer in contents[first_own:]]
    return pickler.loads(frames[0], found, own, importer=importer)


def inverse(mapping: Mapping[torch.device, torch.device] | None) -> dict[str, str]:
    """Returns the inverse of a device map, for a request: where its results belong."""
    return {str(target): str(source) for source, target in (mapping or {}).items()}


def device_map(names: Mapping[str, str]) -> dict[torch.device, torch.device] | None:
    """Returns the device map that a request asks for."""
    if not names:
        return None
    return {torch.device(source): torch.device(target) for source, target in names.items()}
