"""Tensors to descriptors and buffers, and back.

A tensor is described by its layout, dtype, shape and strides, and by where its elements lie in
a buffer. The buffers are snapshots: what the sender writes into a tensor afterwards does not
show at the receiver.

Strides are kept: contiguous, transposed, channels-last, sliced, expanded. Only a view that is
scattered over far more memory than it has elements (see ``SPREAD``) arrives contiguous, with equal
values, rather than taking that memory along. Tensors that share memory in one message share it on
arrival.

Sparse and quantized tensors are described by their parts; ``Parameter`` and ``requires_grad``
are kept, for leaves and others alike; conjugate and negative bits stay bits. Tensors on other
devices than the CPU are staged to the host, and arrive where the sender's device map says, else
on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from enum import IntFlag
from typing import Any

import msgspec
import torch

from tensorplay.distributed.rpc import staging
from tensorplay.errors import ProtocolError, SerializationError

#: Buffers up to this size are Python bytes; larger ones come from ``allocate``.
SMALL_BYTES = 64 << 10
#: A view may take along so many times the memory of its own elements.
SPREAD = 2

Buffer = bytes | memoryview


class Flag(IntFlag):
    """What else there is to a tensor."""

    REQUIRES_GRAD = 1
    CONJ = 2
    NEG = 4
    PARAMETER = 8
    COALESCED = 16
    BUFFER = 32  # torch.nn.Buffer
    PERSISTENT = 64  # of a torch.nn.Buffer


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without its elements.

    Attributes:
        layout: ``"strided"``, ``"meta"``, ``"quantized"``, or a sparse layout's name.
        dtype: Name of the dtype, such as ``"float32"``.
        shape: Sizes of the dimensions.
        stride: Strides in elements; empty for layouts without.
        buffer: Number of the buffer with the elements, -1 for none.
        offset: Where in the buffer the tensor begins, in elements.
        flags: See ``Flag``.
        device: Where the receiver puts it.
        parts: The tensors that a sparse or quantized one consists of.
        extra: Scale and zero point, or axis, of a quantized tensor.
    """

    layout: str
    dtype: str
    shape: list[int]
    stride: list[int] = []
    buffer: int = -1
    offset: int = 0
    flags: int = 0
    device: str = "cpu"
    parts: list[Descriptor] = []
    extra: list[float] = []


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NAMES = {value: name for name, value in _DTYPES.items()}
_SPARSE = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_COMPRESSED = {str(layout): layout for layout in _SPARSE}


def allocate(nbytes: int) -> memoryview:
    """Returns a writable buffer of so many bytes, aligned for every dtype, not cleared."""
    if nbytes == 0:
        return memoryview(bytearray())
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    array = _array(tensor.data_ptr(), nbytes)
    array._owner = tensor  # type: ignore[attr-defined]  # the view keeps the array, that the tensor
    return memoryview(array).cast("B")


def encode(
    tensors: Sequence[torch.Tensor],
    *,
    device_map: Mapping[torch.device, torch.device] | None = None,
) -> tuple[list[Descriptor], list[Buffer]]:
    """Returns the descriptors of tensors, and the buffers with their elements.

    Args:
        tensors: Of any dtype and layout.
        device_map: Where a tensor on a device of this process goes; on the host if not mapped.

    Raises:
        SerializationError: If a tensor cannot travel (a nested one, an opaque layout).
    """
    encoder = _Encoder(device_map or {})
    planned = [encoder.plan(tensor) for tensor in tensors]
    encoder.lay_out()
    return [plan() for plan in planned], encoder.buffers


def decode(descriptors: Sequence[Descriptor], buffers: Sequence[Buffer]) -> list[torch.Tensor]:
    """Returns the tensors that descriptors and buffers stand for.

    A writable, aligned buffer becomes a tensor's memory without a copy.

    Raises:
        ProtocolError: If they do not fit each other.
        RuntimeError: If a tensor belongs on a device that this process lacks.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    try:
        return [_decode(descriptor, buffers, storages) for descriptor in descriptors]
    except (KeyError, IndexError, OverflowError) as error:
        raise ProtocolError(f"a tensor is described wrongly: {error!r}") from None


class _Encoder:
    """Describes tensors in three steps: plan each, lay out their memory, describe each."""

    def __init__(self, device_map: Mapping[torch.device, torch.device]) -> None:
        self.buffers: list[Buffer] = []
        self._device_map = device_map
        self._strided: list[torch.Tensor] = []
        self._places: dict[int, tuple[int, int, list[int]]] = {}  # buffer, offset, stride

    def plan(self, tensor: torch.Tensor) -> Callable[[], Descriptor]:
        """Returns what describes the tensor once memory is laid out."""
        flags = _flags(tensor)
        device = "cpu"
        tensor = tensor.detach()
        if tensor.is_nested or tensor.layout is torch.jagged:
            raise SerializationError(
                "a nested tensor cannot be sent; send its parts (tensor.unbind()) instead"
            )
        if tensor.is_meta:
            return lambda: self._plain(tensor, "meta", flags, stride=list(tensor.stride()))
        if tensor.device.type != "cpu":
            device = str(self._device_map.get(tensor.device, "cpu"))
            tensor = staging.to_host(tensor)
        if tensor.layout is torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
            return self._composed(tensor, "sparse_coo", flags, device, parts)
        if tensor.layout in _SPARSE:
            names = _SPARSE[tensor.layout]
            parts = (*(getattr(tensor, name)() for name in names), tensor.values())
            layout = str(tensor.layout).removeprefix("torch.")
            return self._composed(tensor, layout, flags, device, parts)
        if tensor.layout is not torch.strided:
            raise SerializationError(f"a tensor of layout {tensor.layout} cannot be sent")
        if tensor.is_quantized:
            return self._quantized(tensor, flags, device)
        if tensor.is_conj():
            tensor = tensor.conj()
        if tensor.is_neg():
            tensor = torch._neg_view(tensor)
        self._strided.append(tensor)
        return lambda: self._dense(tensor, flags, device)

    def lay_out(self) -> None:
        """Assigns a place in a buffer to each strided tensor."""
        shared: dict[int, list[torch.Tensor]] = {}
        for tensor in self._strided:
            if tensor.numel():
                shared.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        for tensors in shared.values():
            if len(tensors) == 1:
                self._place_alone(tensors[0])
            else:
                self._place_together(tensors)

    def _place_alone(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        nbytes = _extent(tensor) * tensor.itemsize
        if nbytes > max(SMALL_BYTES, SPREAD * tensor.numel() * tensor.itemsize):
            tensor = tensor.contiguous()
            nbytes = tensor.numel() * tensor.itemsize
        self._places[key] = (len(self.buffers), 0, list(tensor.stride()))
        self.buffers.append(_snapshot(tensor.data_ptr(), nbytes))

    def _place_together(self, tensors: list[torch.Tensor]) -> None:
        size = max(tensor.itemsize for tensor in tensors)
        first = min(tensor.data_ptr() for tensor in tensors)
        base = tensors[0].untyped_storage().data_ptr()
        first -= (first - base) % size  # so that every offset is a whole number of elements
        last = max(tensor.data_ptr() + _extent(tensor) * tensor.itemsize for tensor in tensors)
        for tensor in tensors:
            offset = (tensor.data_ptr() - first) // tensor.itemsize
            self._places[id(tensor)] = (len(self.buffers), offset, list(tensor.stride()))
        self.buffers.append(_snapshot(first, last - first))

    def _dense(self, tensor: torch.Tensor, flags: int, device: str) -> Descriptor:
        buffer, offset, stride = self._places.get(id(tensor), (-1, 0, list(tensor.stride())))
        return self._plain(tensor, "strided", flags, device, stride, buffer, offset)

    def _plain(
        self,
        tensor: torch.Tensor,
        layout: str,
        flags: int,
        device: str = "cpu",
        stride: list[int] | None = None,
        buffer: int = -1,
        offset: int = 0,
    ) -> Descriptor:
        return Descriptor(
            layout,
            _NAMES[tensor.dtype],
            list(tensor.shape),
            stride or [],
            buffer,
            offset,
            flags,
            device,
        )

    def _composed(
        self,
        tensor: torch.Tensor,
        layout: str,
        flags: int,
        device: str,
        parts: Sequence[torch.Tensor],
        extra: Sequence[float] = (),
    ) -> Callable[[], Descriptor]:
        planned = [self.plan(part) for part in parts]
        return lambda: Descriptor(
            layout,
            _NAMES[tensor.dtype],
            list(tensor.shape),
            flags=flags,
            device=device,
            parts=[plan() for plan in planned],
            extra=list(extra),
        )

    def _quantized(self, tensor: torch.Tensor, flags: int, device: str) -> Callable[[], Descriptor]:
        parts = [tensor.int_repr()]
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            extra = [tensor.q_scale(), float(tensor.q_zero_point())]
        else:
            parts += [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
            extra = [float(tensor.q_per_channel_axis())]
        return self._composed(tensor, "quantized", flags, device, parts, extra)


def _flags(tensor: torch.Tensor) -> int:
    flags = Flag.REQUIRES_GRAD if tensor.requires_grad else Flag(0)
    if isinstance(tensor, torch.nn.Parameter):
        flags |= Flag.PARAMETER
    elif isinstance(tensor, torch.nn.Buffer) and type(tensor) is not torch.Tensor:
        flags |= Flag.BUFFER | (Flag.PERSISTENT if tensor.persistent else 0)
    if tensor.layout is torch.strided and not tensor.is_nested:
        if tensor.is_conj():
            flags |= Flag.CONJ
        if tensor.is_neg():
            flags |= Flag.NEG
    elif tensor.layout is torch.sparse_coo and tensor.is_coalesced():
        flags |= Flag.COALESCED
    return int(flags)


def _extent(tensor: torch.Tensor) -> int:
    """Returns how many elements there are from the first in memory to the last."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _array(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)


def _snapshot(address: int, nbytes: int) -> Buffer:
    """Returns a copy of memory."""
    if nbytes <= SMALL_BYTES:
        return ctypes.string_at(address, nbytes)
    source = torch.frombuffer(_array(address, nbytes), dtype=torch.uint8)
    copy = allocate(nbytes)
    torch.frombuffer(copy, dtype=torch.uint8).copy_(source)  # uses several threads
    return copy


def _decode(
    descriptor: Descriptor, buffers: Sequence[Buffer], storages: dict[int, torch.UntypedStorage]
) -> torch.Tensor:
    dtype = _DTYPES[descriptor.dtype]
    if descriptor.layout == "strided":
        tensor = _strided(descriptor, dtype, buffers, storages)
    elif descriptor.layout == "meta":
        tensor = torch.empty_strided(
            descriptor.shape, descriptor.stride, dtype=dtype, device="meta"
        )
    else:
        parts = [_decode(part, buffers, storages) for part in descriptor.parts]
        tensor = _compose(descriptor, dtype, parts)
    if descriptor.flags & Flag.CONJ:
        tensor = tensor.conj()
    if descriptor.flags & Flag.NEG:
        tensor = torch._neg_view(tensor)
    if descriptor.device != "cpu":
        tensor = staging.to_device(tensor, descriptor.device)
    requires_grad = bool(descriptor.flags & Flag.REQUIRES_GRAD)
    if descriptor.flags & Flag.PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad)
    if descriptor.flags & Flag.BUFFER:
        return torch.nn.Buffer(tensor, persistent=bool(descriptor.flags & Flag.PERSISTENT))
    return tensor.requires_grad_() if requires_grad else tensor


def _strided(
    descriptor: Descriptor,
    dtype: torch.dtype,
    buffers: Sequence[Buffer],
    storages: dict[int, torch.UntypedStorage],
) -> torch.Tensor:
    shape, stride = descriptor.shape, descriptor.stride
    if len(shape) != len(stride) or any(n < 0 for n in (*shape, *stride, descriptor.offset)):
        raise ProtocolError(f"a tensor has the shape {shape} and the strides {stride}")
    if 0 in shape:
        return torch.empty_strided(shape, stride, dtype=dtype)
    if not 0 <= descriptor.buffer < len(buffers):
        raise ProtocolError(f"a tensor lies in buffer {descriptor.buffer} of {len(buffers)}")
    storage = storages.get(descriptor.buffer)
    if storage is None:
        storage = storages[descriptor.buffer] = _storage(buffers[descriptor.buffer])
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if (descriptor.offset + extent) * dtype.itemsize > storage.nbytes():
        raise ProtocolError(
            f"a tensor of shape {shape} needs more than the {storage.nbytes()} bytes it lies in"
        )
    with torch.inference_mode(False), torch.no_grad():
        # Not a view in the sense of autograd, whatever shares the storage.
        return torch.empty(0, dtype=dtype).set_(storage, descriptor.offset, shape, stride)


def _storage(buffer: Buffer) -> torch.UntypedStorage:
    view = memoryview(buffer)
    if view.nbytes and not view.readonly:
        direct = torch.frombuffer(view, dtype=torch.uint8)
        if direct.data_ptr() % 16 == 0:
            return direct.untyped_storage()
    own = torch.empty(view.nbytes, dtype=torch.uint8)
    ctypes.memmove(own.data_ptr(), bytes(view), view.nbytes)
    return own.untyped_storage()


def _compose(
    descriptor: Descriptor, dtype: torch.dtype, parts: list[torch.Tensor]
) -> torch.Tensor:
    shape = descriptor.shape
    try:
        if descriptor.layout == "sparse_coo":
            return torch.sparse_coo_tensor(
                parts[0],
                parts[1],
                shape,
                check_invariants=True,
                is_coalesced=bool(descriptor.flags & Flag.COALESCED),
            )
        if descriptor.layout == "quantized":
            if len(parts) == 1:
                scale, zero_point = descriptor.extra
                return torch._make_per_tensor_quantized_tensor(parts[0], scale, int(zero_point))
            return torch._make_per_channel_quantized_tensor(
                parts[0], parts[1], parts[2], int(descriptor.extra[0])
            )
        layout = _COMPRESSED[f"torch.{descriptor.layout}"]
        return torch.sparse_compressed_tensor(
            *parts, size=shape, dtype=dtype, layout=layout, check_invariants=True
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise ProtocolError(f"a {descriptor.layout} tensor is described wrongly: {error}") from None
