"""Payloads that need no pickler."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from tensorplay.distributed.rpc import payload, plain
from tensorplay.errors import ProtocolError


class Text(str):
    """A subclass would come back as its base."""

    __slots__ = ()


def travelled(*values: Any, **named: Any) -> tuple[list[Any], dict[str, Any]]:
    packed = plain.pack(values, named)
    assert packed is not None
    assert plain.is_plain(packed.frames)
    return plain.unpack([bytes(frame) for frame in packed.frames])


def test_no_values_are_no_frames() -> None:
    packed = plain.pack((), {})
    assert packed is not None
    assert len(packed.frames) == 0
    assert plain.is_plain(packed.frames)
    assert plain.unpack(packed.frames) == ([], {})


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -1, 2**63 - 1, -(2**63), 0.1, -0.0, math.inf, "", "ä", b"", b"\x00\xff"],
)
def test_scalars_come_back_as_they_were(value: Any) -> None:
    (got,), named = travelled(value, name=value)
    assert type(got) is type(value)
    assert repr(got) == repr(value)
    assert repr(named) == repr({"name": value})


@pytest.mark.parametrize(
    "value",
    [
        (1,),
        [1],
        {"a": 1},
        Text("a"),
        2**64,
        "\ud800",
        bytearray(b"a"),
        1j,
        len,
        torch.nn.Parameter(torch.ones(1)),
        torch.float32,
    ],
    ids=repr,
)
def test_what_would_change_or_has_structure_is_left_to_the_pickler(value: Any) -> None:
    assert plain.pack((value,), {}) is None
    assert plain.pack((), {"name": value}) is None


def test_a_pickle_is_not_plain() -> None:
    assert not plain.is_plain(payload.pack((None, (1,), {})))


@pytest.mark.parametrize("times", [1, 2, 3])  # the layout is remembered after the first time
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1, 8),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(4).bfloat16(),
        torch.empty(0, 3),
        torch.randn(3, 4).t(),
        torch.randn(2, 8, 8)[:, 1:3],
        torch.randn(1, 8).as_strided((1, 8), (100, 1)),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.ones(2).requires_grad_(),
        torch.ones(40_000),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
    ],
    ids=lambda one: f"{one.dtype}-{tuple(one.shape)}",
)
def test_tensors_among_scalars(tensor: torch.Tensor, times: int) -> None:
    for _ in range(times):
        (number, got, text), named = travelled(1, tensor, "a", flag=True)
    assert (number, text, named) == (1, "a", {"flag": True})
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert got.requires_grad == tensor.requires_grad
    assert got.is_conj() == tensor.is_conj()
    assert not got._is_view()
    if tensor.layout is torch.strided:
        assert got.stride() == tensor.stride()
    if not tensor.is_meta:
        assert torch.equal(got.to_dense().resolve_conj(), tensor.to_dense().resolve_conj())


def test_what_arrives_is_a_snapshot_that_can_be_written_to() -> None:
    tensor = torch.ones(2)
    packed = plain.pack((tensor,), {})
    assert packed is not None
    tensor.zero_()
    first, _ = plain.unpack(packed.frames)
    first[0].add_(1)
    second, _ = plain.unpack(packed.frames)
    assert first[0].tolist() == [2.0, 2.0]
    assert second[0].tolist() == [1.0, 1.0]


def test_several_tensors_share_memory_as_before() -> None:
    base = torch.arange(4.0)
    (whole, part), _ = travelled(base, base[2:])
    part.fill_(9)
    assert whole.tolist() == [0.0, 1.0, 9.0, 9.0]


def test_a_tensor_that_occurs_twice_stays_one_object() -> None:
    tensor = torch.ones(1)
    assert plain.pack((tensor, tensor), {}) is None


def test_a_tensor_with_attributes_keeps_them() -> None:
    tensor = torch.ones(1)
    tensor.note = "kept by the pickler"  # type: ignore[attr-defined]
    assert plain.pack((tensor,), {}) is None


def test_a_tensor_whose_memory_was_freed_is_left_to_the_pickler_to_name() -> None:
    tensor = torch.ones(2, 3)
    assert plain.pack((tensor,), {}) is not None
    tensor.untyped_storage().resize_(0)
    assert plain.pack((tensor,), {}) is None


def test_what_arrives_in_inference_mode_can_be_used_outside() -> None:
    for _ in range(2):
        with torch.inference_mode():
            (got,), _ = travelled(torch.ones(5))
        assert not got.is_inference()


def test_the_hook_sees_and_replaces_the_tensors() -> None:
    packed = plain.pack((1, torch.ones(1)), {})
    assert packed is not None
    assert [tensor.tolist() for tensor in packed.tensors] == [[1.0]]
    values, _ = plain.unpack(packed.frames, lambda found: [one * 3 for one in found])
    assert values[1].tolist() == [3.0]
    seen: list[Any] = []

    def see(found: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(found)
        return found

    plain.unpack([], see)
    assert seen == [[]]


def damaged() -> list[list[bytes]]:
    packed = plain.pack((torch.ones(2), 1), {})
    assert packed is not None
    head, table, buffer = (bytes(frame) for frame in packed.frames)
    descriptors, _ = msgspec.msgpack.decode(table)
    return [
        [b"\x92"],
        [b"\x92\x90\x90"],
        [head + b"\x00"],
        [head, b"", buffer],
        [head, b"\x92\x90\x90\x00", buffer],
        [head, table],
        [head, table, buffer[:4]],
        [head, msgspec.msgpack.encode((descriptors, [7])), buffer],
        [head, msgspec.msgpack.encode((descriptors, [-1])), buffer],
        [head, msgspec.msgpack.encode((descriptors, [])), buffer],
        [head, msgspec.msgpack.encode((descriptors, [0, 1])), buffer],
    ]


@pytest.mark.parametrize("number", range(11))
def test_a_damaged_payload_is_refused(number: int) -> None:
    for _ in range(2):
        with pytest.raises(ProtocolError):
            plain.unpack(damaged()[number])
