"""Where the elements of tensors lie in the buffers that are sent.

A tensor alone takes along the memory from its first element to its last, or, if that is far more
than it has elements, a contiguous copy. Tensors that have memory in common get one buffer for
all, so that they have it in common on arrival; views that lie far apart in one large storage do
not take along what is between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensorplay.distributed.rpc import buffers, staging
from tensorplay.distributed.rpc.buffers import Buffer
from tensorplay.distributed.rpc.shm import Leases
from tensorplay.errors import SerializationError

#: A view may take along so many times the memory of its own elements, or SMALL_BYTES.
SPREAD = 2
#: Views with more elements than this are not compared element by element.
_MOST_COMPARED = 1 << 22

#: Number of a buffer (-1 for none), offset in it in elements, strides.
Place = tuple[int, int, list[int]]

#: How many elements there are in a byte, for dtypes of less than a byte: they allow no views.
_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns how many elements there are in memory from the first to the last.

    Args:
        shape: Sizes, none of them 0.
        stride: Strides in elements.
    """
    last = 0
    for size, step in zip(shape, stride, strict=True):
        last += (size - 1) * step
    return last + 1


def nbytes(count: int, dtype: torch.dtype) -> int:
    """Returns how many bytes so many elements take."""
    per_byte = _PER_BYTE.get(dtype)
    return count * dtype.itemsize if per_byte is None else -(-count // per_byte)


def check(tensor: torch.Tensor) -> None:
    """Checks that a strided tensor has the memory that it is said to have.

    Raises:
        SerializationError: If it does not.
    """
    if not tensor.numel():
        return
    storage = tensor.untyped_storage()
    last = _offset(tensor) + _extent(tensor)
    if not storage.data_ptr() or nbytes(last, tensor.dtype) > storage.nbytes():
        raise SerializationError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own, "
            "or it was freed (by resizing its storage), so it cannot be sent"
        )


def place(
    tensors: Sequence[torch.Tensor], leases: Leases | None = None
) -> tuple[list[Place], list[Buffer]]:
    """Returns the places of strided tensors, and the buffers: snapshots of their memory.

    Args:
        tensors: The tensors.
        leases: Gives memory that the receiver shares.
    """
    placer = _Placer(tensors, leases)
    if len(tensors) == 1:
        placer.alone(0)
    else:
        for group in _sharing(tensors):
            placer.group(group)
    return placer.places, placer.buffers


class _Placer:
    def __init__(self, tensors: Sequence[torch.Tensor], leases: Leases | None) -> None:
        self.places: list[Place] = [(-1, 0, list(tensor.stride())) for tensor in tensors]
        self.buffers: list[Buffer] = []
        self._tensors = tensors
        self._leases = leases

    def alone(self, number: int) -> None:
        """Places a tensor that has its memory for itself."""
        tensor = self._tensors[number]
        if not tensor.numel():
            return
        count = _extent(tensor)
        if nbytes(count, tensor.dtype) > max(buffers.SMALL_BYTES, SPREAD * _own_bytes(tensor)):
            tensor = tensor.detach().contiguous()
            count = tensor.numel()
        self.places[number] = (len(self.buffers), 0, list(tensor.stride()))
        first = _offset(tensor) * tensor.itemsize
        self._add(tensor, first, nbytes(count, tensor.dtype))

    def group(self, numbers: Sequence[int]) -> None:
        """Places tensors of one storage."""
        if len(numbers) == 1:
            self.alone(numbers[0])
            return
        first: dict[tuple[object, ...], int] = {}
        twins = []
        for number in numbers:
            tensor = self._tensors[number]
            key = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if first.setdefault(key, number) != number:
                twins.append((number, first[key]))
        self._spread(list(first.values()))
        for number, twin in twins:
            self.places[number] = self.places[twin]

    def _spread(self, numbers: Sequence[int]) -> None:
        if len(numbers) == 1:
            self.alone(numbers[0])
        elif self._is_dense(numbers):
            self._together(numbers)
        else:
            for cluster in self._clusters(numbers):
                if self._is_dense(cluster) or self._meet(cluster):
                    self._together(cluster)
                else:
                    for number in cluster:
                        self.alone(number)

    def _together(self, numbers: Sequence[int]) -> None:
        tensors = [self._tensors[number] for number in numbers]
        spans = [_span(tensor) for tensor in tensors]
        # Every offset is a whole number of elements, of whatever size.
        first = min(first for first, _ in spans) // buffers.ALIGNMENT * buffers.ALIGNMENT
        for number, tensor in zip(numbers, tensors, strict=True):
            offset = _offset(tensor) - first // tensor.itemsize
            self.places[number] = (len(self.buffers), offset, list(tensor.stride()))
        self._add(tensors[0], first, max(last for _, last in spans) - first)

    def _add(self, tensor: torch.Tensor, first: int, count: int) -> None:
        """Adds a snapshot of so many bytes of a tensor's storage."""
        storage = tensor.untyped_storage()
        if staging.is_host(tensor):
            self.buffers.append(buffers.snapshot(storage.data_ptr() + first, count, self._leases))
            return
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(storage, first, (count,), (1,))
        lease = None if self._leases is None else self._leases.take(count)
        if lease is None:
            self.buffers.append(buffers.of_tensor(staging.to_host(memory)))
        else:
            staging.to_host(memory, torch.frombuffer(lease.memory, dtype=torch.uint8))
            self.buffers.append(lease.memory)

    def _is_dense(self, numbers: Sequence[int]) -> bool:
        """Returns whether little lies between tensors of one storage that is none of theirs."""
        tensors = [self._tensors[number] for number in numbers]
        spans = [_span(tensor) for tensor in tensors]
        size = max(last for _, last in spans) - min(first for first, _ in spans)
        return size <= max(buffers.SMALL_BYTES, SPREAD * sum(map(_own_bytes, tensors)))

    def _clusters(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the tensors in groups whose memory does not interleave with the others'."""
        spans = sorted((*_span(self._tensors[number]), number) for number in numbers)
        clusters: list[list[int]] = []
        end = -1
        for first, last, number in spans:
            if first < end:
                clusters[-1].append(number)
            else:
                clusters.append([number])
            end = max(end, last)
        return clusters

    def _meet(self, numbers: Sequence[int]) -> bool:
        """Returns whether two of some tensors may have an element in common."""
        tensors = [self._tensors[number] for number in numbers]
        if len({tensor.dtype.itemsize for tensor in tensors}) > 1 or (
            sum(tensor.numel() for tensor in tensors) > _MOST_COMPARED
        ):
            return True
        positions = torch.cat([_positions(tensor) for tensor in tensors])
        distinct: torch.Tensor = positions.unique()  # type: ignore[no-untyped-call]
        return distinct.numel() < positions.numel()


def _sharing(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the numbers of the tensors that have elements, grouped by storage."""
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            key = (tensor.device, tensor.untyped_storage().data_ptr())
            groups.setdefault(key, []).append(number)
    return list(groups.values())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the one after the last."""
    first = _offset(tensor)
    last = first + _extent(tensor)
    return first * tensor.itemsize, nbytes(last, tensor.dtype)


def _own_bytes(tensor: torch.Tensor) -> int:
    count = min(tensor.numel(), _extent(tensor))
    return nbytes(count, tensor.dtype)


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    """Returns where in its storage the elements of a tensor lie, each once."""
    found = torch.tensor([_offset(tensor)])
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        if step:
            found = (found[:, None] + torch.arange(size) * step).flatten()
    distinct: torch.Tensor = found.unique()  # type: ignore[no-untyped-call]
    return distinct


def _extent(tensor: torch.Tensor) -> int:
    return tensor.numel() if tensor.is_contiguous() else extent(tensor.shape, tensor.stride())


def _offset(tensor: torch.Tensor) -> int:
    return tensor.storage_offset()  # type: ignore[return-value]  # only tracing makes it symbolic
