"""Tensors arrive with their strides and with the memory that they share, as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from tensorplay.distributed.rpc import tensors
from tests.rpc.travel import assert_same, size, travel

# ----------------------------------------------------------------------------------------- strides

BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: BASE,
    "transposed": lambda: BASE.transpose(0, 3),
    "channels last": lambda: BASE.contiguous(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.rand(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
    "every other": lambda: torch.arange(20)[::2],
    "columns": lambda: BASE[..., 1:4],
    "offset": lambda: torch.arange(20)[7:],
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "expanded scalar": lambda: torch.tensor(5.0).expand(1000, 1000),
    "expanded, transposed": lambda: torch.arange(3).expand(4, 3).t(),
    "unfolded": lambda: torch.arange(10).unfold(0, 4, 1),
    "diagonal": lambda: torch.arange(4).view(2, 2).diagonal(),
    "as_strided": lambda: torch.arange(20).as_strided((3, 3), (2, 3), 4),
    "odd strides of size 1": lambda: torch.arange(6).as_strided((1, 6), (77, 1)),
    "sizes of 1": lambda: torch.zeros(1, 1, 1),
}


@pytest.mark.parametrize("kind", KEPT)
def test_strides_are_kept(kind: str) -> None:
    sent = KEPT[kind]()
    got = travel(sent)
    assert_same(sent, got)
    assert got.stride() == sent.stride()


def test_a_flipped_tensor_travels() -> None:
    sent = torch.arange(6).view(2, 3).flip(0, 1)
    assert_same(sent, travel(sent))


def test_a_scattered_view_arrives_contiguous() -> None:
    sent = torch.arange(100_000)[::1000]
    got = travel(sent)
    assert_same(sent, got)
    assert got.is_contiguous()


@pytest.mark.parametrize(
    "view",
    [
        lambda big: big[500_000:500_010],
        lambda big: big[::100_000],
        lambda big: big.view(1000, 1000)[:, 0],
        lambda big: big.view(1000, 1000)[10:12, 10:12],
        lambda big: big[:1].expand(1000, 1000),
    ],
    ids=["slice", "steps", "column", "block", "expanded"],
)
def test_a_small_view_of_a_large_storage_sends_only_its_own(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    sent = view(torch.arange(1_000_000))
    assert size(sent) < 16_000
    assert_same(sent, travel(sent))


def test_views_far_apart_do_not_send_what_is_between_them() -> None:
    big = torch.arange(1_000_000)
    sent = [big[:10], big[-10:], big[500_000:500_010]]
    assert size(sent) < 2_000
    assert [one.tolist() for one in travel(sent)] == [one.tolist() for one in sent]


def test_an_unaligned_storage_travels() -> None:
    memory = bytearray(range(33))
    sent = torch.frombuffer(memory, dtype=torch.uint8)[1:]
    assert_same(sent, travel(sent))


# ----------------------------------------------------------------------------------- shared memory


def test_a_tensor_sent_twice_is_one_tensor() -> None:
    one = torch.ones(3)
    first, second = travel((one, one))
    assert first is second


def test_views_still_share_their_memory() -> None:
    base = torch.zeros(4, 4)
    whole, row, column, turned = travel((base, base[1], base[:, 2], base.t()))
    row[2] = 7
    assert whole[1, 2] == column[1] == turned[2, 1] == 7


def test_views_share_their_memory_without_the_whole() -> None:
    base = torch.arange(10)
    left, right = travel((base[:6], base[4:]))
    left[5] = 77
    assert right[1] == 77
    assert right.tolist() == [4, 77, 6, 7, 8, 9]


def test_views_of_different_dtypes_share_their_memory() -> None:
    base = torch.zeros(4)
    floats, integers = travel((base, base.view(torch.int32)[1:]))
    floats[1] = 1.0
    assert integers[0] == 0x3F80_0000


def test_views_of_a_shared_complex_tensor() -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    whole, real = travel((base, base.real))
    real[0] = 2
    assert whole[0] == 2


def test_tensors_that_share_nothing_share_nothing_on_arrival() -> None:
    first, second = travel((torch.zeros(3), torch.zeros(3)))
    first.fill_(1)
    assert second.tolist() == [0, 0, 0]


def test_tied_parameters_stay_tied() -> None:
    layer = torch.nn.Linear(2, 2)
    pair = torch.nn.ModuleList([layer, torch.nn.Linear(2, 2)])
    pair[1].weight = layer.weight
    got = travel(pair)
    assert got[0].weight is got[1].weight
    assert isinstance(got[0].weight, torch.nn.Parameter)


def test_received_memory_lives_as_long_as_a_view_of_it() -> None:
    got = travel(torch.arange(100_000))
    last = got[-1:]
    del got
    gc.collect()
    assert last.item() == 99_999


def test_received_memory_is_freed_with_the_tensor() -> None:
    class Memory(bytearray):
        pass

    descriptors, buffers = tensors.encode([torch.arange(100_000)])
    memory = Memory(buffers[0])
    gone = weakref.ref(memory)
    got = tensors.decode(descriptors, [memoryview(memory)])
    del memory
    assert gone() is not None
    del got
    gc.collect()
    assert gone() is None


def test_a_received_buffer_is_not_copied() -> None:
    sent = torch.arange(100_000, dtype=torch.uint8)
    descriptors, buffers = tensors.encode([sent])
    memory = memoryview(bytearray(buffers[0]))
    (got,) = tensors.decode(descriptors, [memory])
    memory[0] = 99
    assert got[0] == 99


@pytest.mark.parametrize("shift", range(1, 16))
def test_an_unaligned_buffer_is_read(shift: int) -> None:
    sent = torch.arange(5).to(torch.complex128)
    descriptors, buffers = tensors.encode([sent])
    memory = memoryview(bytearray(shift) + bytearray(buffers[0]))[shift:]
    (got,) = tensors.decode(descriptors, [memory])
    assert got.data_ptr() % 16 == 0
    assert_same(sent, got)


def test_a_read_only_buffer_is_copied() -> None:
    descriptors, buffers = tensors.encode([torch.arange(5)])
    frame = bytes(buffers[0])
    (got,) = tensors.decode(descriptors, [frame])
    got.fill_(9)
    assert frame == bytes(buffers[0])


# --------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("count", [1, 10, 100_000])
@pytest.mark.parametrize("view", [False, True])
def test_values_are_those_of_the_call(count: int, view: bool) -> None:
    base = torch.ones(2, count)
    sent = base.t() if view else base
    descriptors, buffers = tensors.encode([sent])
    base.zero_()
    (got,) = tensors.decode(descriptors, buffers)
    assert bool((got == 1).all())


def test_sparse_values_are_a_snapshot() -> None:
    sent = torch.eye(3).to_sparse()
    descriptors, buffers = tensors.encode([sent])
    sent._values().zero_()
    (got,) = tensors.decode(descriptors, buffers)
    assert torch.equal(got.to_dense(), torch.eye(3))
