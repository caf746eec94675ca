"""What memory tensors take along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorplay.distributed.rpc import placement, tensors
from tensorplay.distributed.rpc.buffers import SMALL_BYTES
from tensorplay.errors import SerializationError
from tests.rpc.travel import size, travel

TABLE = torch.arange(1_000_000).view(1000, 1000)


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [((), (), 1), ((3,), (1,), 3), ((2, 3), (3, 1), 6), ((3,), (2,), 5), ((4, 3), (0, 1), 3)],
)
def test_extent(shape: tuple[int, ...], stride: tuple[int, ...], expected: int) -> None:
    assert placement.extent(shape, stride) == expected


def test_bytes_of_elements_smaller_than_one() -> None:
    assert placement.nbytes(5, torch.float64) == 40
    assert placement.nbytes(5, torch.quint4x2) == 3
    assert placement.nbytes(5, torch.quint2x4) == 2


def test_a_dense_tensor_takes_along_its_own_memory() -> None:
    places, buffers = placement.place([TABLE[3:5]])
    assert places == [(0, 0, [1000, 1])]
    assert [len(buffer) for buffer in buffers] == [16_000]


def test_a_scattered_one_takes_along_a_copy() -> None:
    places, buffers = placement.place([TABLE[:, 3]])
    assert places == [(0, 0, [1])]
    assert [len(buffer) for buffer in buffers] == [8_000]


def test_an_empty_one_has_no_place() -> None:
    assert placement.place([torch.ones(0, 3)]) == ([(-1, 0, [3, 1])], [])


def test_what_overlaps_gets_one_buffer() -> None:
    places, buffers = placement.place([TABLE[:10], TABLE[5:12], torch.ones(2)])
    assert len(buffers) == 2
    assert places[0][0] == places[1][0] != places[2][0]
    assert places[1][1] - places[0][1] == 5000
    assert len(buffers[0]) == 12 * 8000


def test_small_views_of_one_storage_keep_it() -> None:
    first, second = travel(tuple(torch.arange(100).split(50)))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_parts_far_apart_get_buffers_of_their_own() -> None:
    places, buffers = placement.place([TABLE[0], TABLE[999], TABLE[999, 500:]])
    assert [len(buffer) for buffer in buffers] == [8_000, 8_000]
    assert places[1][0] == places[2][0]


def test_columns_do_not_take_the_table_along() -> None:
    sent = (TABLE[:, 0], TABLE[:, 1], TABLE[:, :3:2])  # the first is also in the last
    assert size((TABLE[:, 0], TABLE[:, 1])) < 17_000
    assert size(sent) > SMALL_BYTES  # two of them meet, and must on arrival
    first, _, both = travel(sent)
    first[0] = -1
    assert both[0, 0] == -1


def test_the_same_column_twice_travels_once() -> None:
    column = TABLE[:, 5]
    assert size((column, column.detach())) < 9_000
    first, second = travel((column, column.detach()))
    first[3] = -7
    assert second[3] == -7


def test_columns_too_large_to_compare_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_MOST_COMPARED", 100)
    sent = (TABLE[:, 0], TABLE[:, 1])
    assert size(sent) > 7_000_000
    assert [one.tolist() for one in travel(sent)] == [one.tolist() for one in sent]


def test_freed_memory_is_not_read() -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(100)
    with pytest.raises(SerializationError, match=r"shape \(1000,\) has no memory of its own"):
        placement.check(tensor)


def test_a_wrapper_without_memory_is_not_read() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (1000,))
    with pytest.raises(SerializationError, match="invalid python storage"):
        tensors.check([wrapper])


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draws views of one storage, of several dtypes and any non-negative strides."""
    base = torch.arange(40_000, dtype=torch.int32)
    found = []
    for _ in range(draw(st.integers(1, 4))):
        memory = base.view(draw(st.sampled_from([torch.int32, torch.int64, torch.uint8])))
        dimensions = draw(st.integers(0, 3))
        shape = [draw(st.integers(0, 4)) for _ in range(dimensions)]
        stride = [draw(st.sampled_from([0, 1, 2, 7, 3000])) for _ in range(dimensions)]
        last = placement.extent(shape, stride) if 0 not in shape else 1
        if last > memory.numel():
            continue
        offset = draw(st.integers(0, memory.numel() - last))
        found.append(memory.as_strided(shape, stride, offset))
    return found


@settings(max_examples=200, deadline=None)
@given(views())
def test_any_views_arrive_equal_and_share_what_they_shared(sent: list[torch.Tensor]) -> None:
    got = travel(sent)
    for mine, theirs in zip(sent, got, strict=True):
        assert torch.equal(mine, theirs)
    for index, mine in enumerate(sent):
        if not mine.numel() or mine.stride() != got[index].stride():
            continue  # it was scattered: a copy
        first = (0,) * mine.dim()
        # What a write into one shows in the others is what it shows in the originals.
        before = [one.clone() for one in sent]
        old = mine[first].item()
        new = (old + 1) % 128
        mine[first] = new
        got[index][first] = new
        for other, theirs in zip(sent, got, strict=True):
            assert torch.equal(other, theirs)
        mine[first] = old
        got[index][first] = old
        assert all(map(torch.equal, before, sent))
