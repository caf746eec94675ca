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

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from tensorplay.distributed.rpc import buffers, placement, staging
from tensorplay.distributed.rpc.buffers import Buffer
from tensorplay.distributed.rpc.placement import Place
from tensorplay.distributed.rpc.shm import Leases
from tensorplay.errors import ConfigError, ProtocolError, SerializationError

#: Bits of ``Descriptor.flags``.
REQUIRES_GRAD, CONJ, NEG, PARAMETER, COALESCED = 1, 2, 4, 8, 16

#: Where a tensor on a device of this process goes.
DeviceMap = Mapping[torch.device, torch.device]


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without its elements.

    Attributes:
        layout: ``"strided"``, ``"meta"``, ``"quantized"``, or a sparse layout's name.
        dtype: Name of the dtype, such as ``"float32"``.
        shape: Sizes of the dimensions.
        stride: Strides in elements; empty for layouts without.
        buffer: Number of the buffer with the elements, -1 for none.
        offset: Where in the buffer the tensor begins, in elements.
        flags: ``REQUIRES_GRAD``, ``CONJ``, ``NEG``, ``PARAMETER``, ``COALESCED``.
        device: Where the receiver puts it.
        parts: Indices and values of a sparse tensor; scales and zero points of one that is
            quantized per channel.
        extra: Scale and zero point of a quantized tensor, or the axis of its channels.
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
_LAYOUTS = {
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}
_COMPRESSED = {layout: name for name, layout in _LAYOUTS.items()}
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_CPU = torch.device("cpu")
#: No tensor has more dimensions than this.
_MOST_DIMENSIONS = 64
_LARGEST = 2**63 - 1


def encode(
    tensors: Sequence[torch.Tensor],
    *,
    device_map: DeviceMap | None = None,
    leases: Leases | None = None,
) -> tuple[list[Descriptor], list[Buffer]]:
    """Returns the descriptors of tensors, and the buffers with their elements.

    Args:
        tensors: Of any dtype and layout.
        device_map: Where a tensor on a device of this process goes; on the host if not mapped.
        leases: Gives memory that the receiver shares.

    Raises:
        SerializationError: If a tensor cannot travel: a nested one, an opaque layout, one
            without memory of its own.
    """
    planner = _Planner(device_map or {})
    plans = [planner.plan(tensor) for tensor in tensors]
    places, contents = placement.place(planner.strided, leases)
    return [plan(places) for plan in plans], contents


def check(tensors: Sequence[torch.Tensor]) -> None:
    """Raises what ``encode`` would raise, but copies nothing.

    Raises:
        SerializationError: If a tensor cannot travel.
    """
    planner = _Planner({})
    for tensor in tensors:
        planner.plan(tensor)


def decode(descriptors: Sequence[Descriptor], contents: Sequence[Buffer]) -> list[torch.Tensor]:
    """Returns the tensors that descriptors and buffers stand for.

    A writable, aligned buffer becomes a tensor's memory without a copy.

    Raises:
        ProtocolError: If they do not fit each other.
        ConfigError: If a tensor belongs on a device that this process lacks.
    """
    decoder = _Decoder(contents)
    if not torch.is_inference_mode_enabled():
        return [decoder.tensor(descriptor) for descriptor in descriptors]
    with torch.inference_mode(False):  # what arrives is used outside of it, too
        return [decoder.tensor(descriptor) for descriptor in descriptors]


#: Makes a descriptor, once the strided tensors have their places.
_Plan = Callable[[Sequence[Place]], Descriptor]


class _Planner:
    """Collects the strided tensors that tensors consist of, and plans their descriptors."""

    def __init__(self, device_map: DeviceMap) -> None:
        self.strided: list[torch.Tensor] = []
        self._device_map = device_map

    def plan(self, tensor: torch.Tensor) -> _Plan:
        try:
            return self._plan(tensor)
        except SerializationError:
            raise
        except RuntimeError as error:
            # A tensor inside of vmap or grad, or of a backend without memory of its own.
            raise SerializationError(f"a tensor cannot be sent: {error}") from error

    def _plan(self, tensor: torch.Tensor) -> _Plan:
        flags = REQUIRES_GRAD if tensor.requires_grad else 0
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
            flags |= PARAMETER
        if tensor.is_nested:
            raise SerializationError(
                f"a nested tensor of layout {tensor.layout} cannot be sent; send its parts "
                "(tensor.unbind()) instead"
            )
        layout = tensor.layout
        if layout is not torch.strided:
            return self._sparse(tensor.detach(), layout, flags)
        if tensor.is_conj():
            flags |= CONJ
            tensor = tensor.detach().conj()
        if tensor.is_neg():
            flags |= NEG
            tensor = torch._neg_view(tensor.detach())
        if tensor.is_quantized:
            return self._quantized(tensor.detach(), flags)
        return self._meta(tensor, flags) if tensor.is_meta else self._strided(tensor, flags)

    def _strided(
        self,
        tensor: torch.Tensor,
        flags: int,
        layout: str = "strided",
        parts: Sequence[_Plan] = (),
        extra: Sequence[float] = (),
    ) -> _Plan:
        placement.check(tensor)
        number = len(self.strided)
        self.strided.append(tensor)
        dtype, shape, device = _NAMES[tensor.dtype], list(tensor.shape), self._target(tensor)

        def describe(places: Sequence[Place]) -> Descriptor:
            buffer, offset, stride = places[number]
            done = [part(places) for part in parts]
            return Descriptor(
                layout, dtype, shape, stride, buffer, offset, flags, device, done, list(extra)
            )

        return describe

    def _target(self, tensor: torch.Tensor) -> str:
        device = tensor.device
        if not self._device_map and device == _CPU:
            return "cpu"
        return str(self._device_map.get(device, "cpu"))

    def _meta(self, tensor: torch.Tensor, flags: int) -> _Plan:
        made = Descriptor(
            "meta", _NAMES[tensor.dtype], list(tensor.shape), list(tensor.stride()), flags=flags
        )
        return lambda places: made

    def _quantized(self, tensor: torch.Tensor, flags: int) -> _Plan:
        if tensor.is_meta:
            raise SerializationError("a quantized tensor of the meta device cannot be sent")
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            extra = (tensor.q_scale(), float(tensor.q_zero_point()))
            return self._strided(tensor, flags, "quantized", extra=extra)
        parts = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
        plans = [self._plan(part) for part in parts]
        axis = float(tensor.q_per_channel_axis())
        return self._strided(tensor, flags, "quantized", plans, (axis,))

    def _sparse(self, tensor: torch.Tensor, layout: torch.layout, flags: int) -> _Plan:
        if tensor.is_meta:
            raise SerializationError("a sparse tensor of the meta device cannot be sent")
        if layout is torch.sparse_coo:
            name = "sparse_coo"
            parts: tuple[torch.Tensor, ...] = (tensor._indices(), tensor._values())
            flags |= COALESCED if tensor.is_coalesced() else 0
        elif layout in _COMPRESSED:
            name = _COMPRESSED[layout]
            if layout in _BY_ROWS:
                parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
            else:
                parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        else:
            raise SerializationError(
                f"a tensor of layout {layout} cannot be sent; send tensor.to_dense() instead"
            )
        plans = [self._plan(part) for part in parts]
        dtype, shape, device = _NAMES[tensor.dtype], list(tensor.shape), self._target(tensor)
        return lambda places: Descriptor(
            name,
            dtype,
            shape,
            flags=flags,
            device=device,
            parts=[plan(places) for plan in plans],
        )


class _Decoder:
    """Makes tensors of descriptors that may be wrong, and of the buffers of one message."""

    def __init__(self, contents: Sequence[Buffer]) -> None:
        self._contents = contents
        self._memory: dict[tuple[int, str], torch.Tensor] = {}

    def tensor(self, descriptor: Descriptor) -> torch.Tensor:
        try:
            dtype = _DTYPES[descriptor.dtype]
        except KeyError:
            raise ProtocolError(f"a tensor has the unknown dtype {descriptor.dtype!r}") from None
        flags = descriptor.flags
        try:
            tensor = self._make(descriptor, dtype)
            if not flags:
                return tensor
            if flags & CONJ:
                torch._C._set_conj(tensor, True)
            if flags & NEG:
                torch._C._set_neg(tensor, True)
            if flags & PARAMETER:
                return torch.nn.Parameter(tensor, bool(flags & REQUIRES_GRAD))
            return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor
        except (ConfigError, ProtocolError, torch.OutOfMemoryError):
            raise
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            text = str(error).partition("\n")[0]
            raise ProtocolError(
                f"a {descriptor.layout} tensor is described wrongly: {text}"
            ) from error

    def _make(self, descriptor: Descriptor, dtype: torch.dtype) -> torch.Tensor:
        layout, shape = descriptor.layout, descriptor.shape
        if (dtype in _QUANTIZED) != (layout == "quantized"):
            raise ProtocolError(f"no {layout} tensor has the dtype {descriptor.dtype}")
        if layout == "strided":
            return self._fill(torch.empty, descriptor, dtype, _extent(descriptor))
        if layout == "quantized":
            count = _extent(descriptor)
            return self._fill(self._quantizer(descriptor), descriptor, dtype, count)
        if layout == "meta":
            _extent(descriptor)
            return torch.empty_strided(shape, descriptor.stride, dtype=dtype, device="meta")
        if layout == "sparse_coo":
            indices, values = self._parts(descriptor, 2)
            coalesced = bool(descriptor.flags & COALESCED)
            return torch.sparse_coo_tensor(
                indices, values, shape, dtype=dtype, check_invariants=True, is_coalesced=coalesced
            )
        if layout not in _LAYOUTS:
            raise ProtocolError(f"a tensor has the unknown layout {layout!r}")
        outer, inner, values = self._parts(descriptor, 3)
        return torch.sparse_compressed_tensor(
            outer,
            inner,
            values,
            shape,
            dtype=dtype,
            layout=_LAYOUTS[layout],
            check_invariants=True,
        )

    def _parts(self, descriptor: Descriptor, count: int) -> list[torch.Tensor]:
        """Returns the parts, which have none themselves: no description is without end."""
        parts = descriptor.parts
        if len(parts) != count or any(part.layout != "strided" for part in parts):
            raise ProtocolError(
                f"a {descriptor.layout} tensor consists of {count} strided ones, this one of "
                f"{[part.layout for part in parts]}"
            )
        return [self.tensor(part) for part in parts]

    def _quantizer(self, descriptor: Descriptor) -> Callable[..., torch.Tensor]:
        """Returns what makes an empty tensor with the quantizer of the one described."""
        shape, extra = descriptor.shape, descriptor.extra
        if not descriptor.parts:
            scale, zero_point = extra
            return lambda _, **kwargs: torch._empty_affine_quantized(
                (0,), scale=scale, zero_point=int(zero_point), **kwargs
            )
        scales, zero_points = self._parts(descriptor, 2)
        axis = int(extra[0])
        if not 0 <= axis < len(shape) or not (scales.shape == zero_points.shape == (shape[axis],)):
            raise ProtocolError(
                f"a tensor of shape {shape} is quantized along axis {axis} with "
                f"{list(scales.shape)} scales and {list(zero_points.shape)} zero points"
            )
        none = [size if index == axis else 0 for index, size in enumerate(shape)]
        return lambda _, **kwargs: torch._empty_per_channel_affine_quantized(
            none, scales=scales, zero_points=zero_points, axis=axis, **kwargs
        )

    def _fill(
        self,
        empty: Callable[..., torch.Tensor],
        descriptor: Descriptor,
        dtype: torch.dtype,
        count: int,
    ) -> torch.Tensor:
        """Returns a tensor that lies in a buffer.

        Its memory is set, so that autograd takes it for no view, whatever shares the memory.
        """
        shape, stride, offset = descriptor.shape, descriptor.stride, descriptor.offset
        if 0 in shape:
            memory = torch.empty(0, dtype=torch.uint8)
            if descriptor.device != "cpu":
                memory = staging.to_device(memory, descriptor.device)
            offset = 0
        else:
            memory = self._bytes(descriptor.buffer, descriptor.device)
            needed = placement.nbytes(offset + count, dtype)
            if needed > memory.numel():
                raise ProtocolError(
                    f"a tensor of shape {shape} needs {needed} bytes of a buffer of "
                    f"{memory.numel()}"
                )
        tensor = empty(0, dtype=dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), offset, shape, stride)

    def _bytes(self, number: int, device: str) -> torch.Tensor:
        """Returns the bytes of a buffer, on a device; the same ones to all that share it."""
        memory = self._memory.get((number, device))
        if memory is None:
            if not 0 <= number < len(self._contents) or not len(self._contents[number]):
                raise ProtocolError(
                    f"a tensor lies in buffer {number}; there are {len(self._contents)}, and "
                    "empty ones hold none"
                )
            memory = buffers.as_tensor(self._contents[number])
            if device != "cpu":
                memory = staging.to_device(memory, device)
            self._memory[number, device] = memory
        return memory


def _extent(descriptor: Descriptor) -> int:
    """Returns how many elements lie from the first to the last of a tensor that has any.

    Raises:
        ProtocolError: If there can be no such tensor.
    """
    shape, stride = descriptor.shape, descriptor.stride
    if len(shape) == len(stride) <= _MOST_DIMENSIONS and descriptor.offset >= 0:
        last = 0
        for size, step in zip(shape, stride, strict=True):
            if size < 0 or step < 0:
                break
            last += (size - 1) * step
        else:
            if last < _LARGEST:
                return last + 1
    raise ProtocolError(
        f"no tensor has the shape {shape}, the strides {stride} and the offset {descriptor.offset}"
    )
