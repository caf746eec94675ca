"""Sends objects through the payload code, without a wire."""

from __future__ import annotations

from typing import Any

import torch

from tensorplay.distributed.rpc import payload


def received(frames: list[Any]) -> list[Any]:
    """Returns frames as they come from the wire: other memory, which may be written to."""
    return [memoryview(bytearray(frame)) for frame in frames]


def travel(obj: Any, **options: Any) -> Any:
    """Returns what arrives of an object."""
    return payload.unpack(received(payload.pack(obj, **options)))


def size(obj: Any) -> int:
    """Returns how many bytes travel for an object."""
    return sum(memoryview(frame).nbytes for frame in payload.pack(obj))


def values(tensor: torch.Tensor) -> list[int]:
    """Returns the bytes of a strided tensor's elements, in order, whatever its dtype is."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    memory = torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage())
    first = flat.storage_offset() * flat.itemsize
    found: list[int] = memory[first : first + flat.numel() * flat.itemsize].tolist()
    return found


def assert_same(sent: torch.Tensor, got: torch.Tensor) -> None:
    """Asserts that a strided tensor is equal to another in all that can be told."""
    assert type(got) is type(sent)
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.requires_grad == sent.requires_grad
    assert got.is_conj() == sent.is_conj()
    assert got.is_neg() == sent.is_neg()
    assert values(got) == values(sent)
