"""Tensors of devices pass through the host: with a fake on the CPU, and with CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from tensorplay.distributed.rpc import payload, staging, tensors
from tensorplay.distributed.rpc.pipelined import CHUNK_BYTES
from tensorplay.errors import ConfigError, SerializationError
from tests.rpc.travel import received, travel

CPU = torch.device("cpu")
FAKE = torch.device("cpu:0")


class FakeStager:
    """Takes all memory of the CPU for that of a device, and notes what is copied."""

    def __init__(self) -> None:
        self.to_host_sizes: list[int] = []
        self.to_device_sizes: list[int] = []

    def is_host(self, tensor: torch.Tensor) -> bool:
        return False

    def to_host(self, memory: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        assert (memory.dtype, memory.dim()) == (torch.uint8, 1)
        self.to_host_sizes.append(memory.numel())
        return memory.clone() if target is None else target.copy_(memory)

    def to_device(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert (memory.dtype, memory.dim()) == (torch.uint8, 1)
        assert device == FAKE
        self.to_device_sizes.append(memory.numel())
        return memory.clone()

    def devices(self) -> Sequence[str]:
        return ["cpu:0"]


@pytest.fixture
def fake() -> Iterator[FakeStager]:
    stager = FakeStager()
    with staging.use(stager):
        yield stager


def test_a_tensor_is_staged_and_arrives_on_the_host(fake: FakeStager) -> None:
    sent = torch.arange(6).view(2, 3).t()
    got = travel(sent)
    assert torch.equal(got, sent)
    assert got.stride() == sent.stride()
    assert fake.to_host_sizes == [48]
    assert fake.to_device_sizes == []


def test_a_mapped_tensor_arrives_on_the_device(fake: FakeStager) -> None:
    sent = torch.arange(6)
    assert torch.equal(travel(sent, device_map={CPU: FAKE}), sent)
    assert fake.to_host_sizes == fake.to_device_sizes == [48]


def test_views_are_staged_once_and_share_memory_on_the_device(fake: FakeStager) -> None:
    base = torch.zeros(3, 4)
    whole, row = travel((base, base[1]), device_map={CPU: FAKE})
    row[2] = 5
    assert whole[1, 2] == 5
    assert fake.to_host_sizes == fake.to_device_sizes == [48]


def test_only_the_view_is_staged(fake: FakeStager) -> None:
    big = torch.arange(100_000).view(1000, 100)
    got = travel([big[:, 7], big[3, 50:]], device_map={CPU: FAKE})
    assert torch.equal(got[0], big[:, 7])
    assert torch.equal(got[1], big[3, 50:])
    assert sorted(fake.to_host_sizes) == [50 * 8, 1000 * 8]


def test_bits_parts_and_classes_survive_staging(fake: FakeStager) -> None:
    parameter = torch.nn.Parameter(torch.rand(2))
    sparse = torch.eye(3).to_sparse_csr()
    quantized = torch.quantize_per_tensor(torch.rand(3), 0.1, 2, torch.quint8)
    conjugate = torch.rand(2, dtype=torch.complex64).conj()
    got = travel((parameter, sparse, quantized, conjugate), device_map={CPU: FAKE})
    assert type(got[0]) is torch.nn.Parameter
    assert torch.equal(got[0], parameter)
    assert torch.equal(got[1].to_dense(), sparse.to_dense())
    assert torch.equal(got[2].dequantize(), quantized.dequantize())
    assert got[3].is_conj()
    assert torch.equal(got[3], conjugate)


@pytest.mark.parametrize("shape", [(0,), (0, 4), ()])
def test_empty_and_scalar_tensors_are_staged(fake: FakeStager, shape: tuple[int, ...]) -> None:
    assert travel(torch.ones(shape), device_map={CPU: FAKE}).shape == shape


def test_staged_values_are_a_snapshot(fake: FakeStager) -> None:
    sent = torch.ones(100_000)
    descriptors, buffers = tensors.encode([sent])
    sent.zero_()
    assert bool((tensors.decode(descriptors, buffers)[0] == 1).all())


def test_the_stager_of_before_comes_back() -> None:
    with staging.use(FakeStager()):
        assert not staging.is_host(torch.ones(1))
        with pytest.raises(SerializationError), staging.use(FakeStager()):
            payload.pack(threading.Lock())
        assert not staging.is_host(torch.ones(1))
    assert staging.is_host(torch.ones(1))


@pytest.mark.parametrize("device", ["cuda:97", "xpu:3", "meta"])
def test_a_device_that_is_not_here_is_named_with_those_that_are(device: str) -> None:
    frames = payload.pack(torch.ones(2), device_map={CPU: torch.device(device)})
    with pytest.raises(ConfigError, match=rf"'{device}', which this process lacks.*it has cpu"):
        payload.unpack(received(frames))


def test_device_maps_are_told_by_name_and_inverted() -> None:
    mapping = {torch.device("cuda:0"): torch.device("cuda:1"), CPU: CPU}
    names = payload.inverse(mapping)
    assert names == {"cuda:1": "cuda:0", "cpu": "cpu"}
    assert payload.device_map(names) == {torch.device("cuda:1"): torch.device("cuda:0"), CPU: CPU}
    assert payload.inverse(None) == {}
    assert payload.device_map({}) is None


def test_a_cpu_tensor_is_not_staged_without_a_map() -> None:
    class Refusing(FakeStager):
        def is_host(self, tensor: torch.Tensor) -> bool:
            return True

        def to_host(self, memory: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
            raise AssertionError

        def to_device(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
            raise AssertionError

    with staging.use(Refusing()):
        assert travel(torch.ones(2)).tolist() == [1, 1]


def test_memory_that_cannot_be_pinned_is_used_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(
        shape: tuple[int, ...], pin_memory: bool = False, *, dtype: torch.dtype
    ) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("out of memory that can be locked")
        return real(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    assert staging._pinned(8).numel() == 8


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda:0")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 10, 3_000_000])
@pytest.mark.parametrize("mapped", [False, True])
def test_cuda_tensors_travel(count: int, mapped: bool) -> None:
    sent = torch.arange(count, device=CUDA)
    got = travel(sent, device_map={CUDA: CUDA} if mapped else None)
    assert got.device == (CUDA if mapped else CPU)
    assert torch.equal(got.cpu(), sent.cpu())


@gpu
@pytest.mark.gpu
def test_cuda_values_are_those_of_the_call() -> None:
    sent = torch.zeros(10_000_000, device=CUDA)
    for _ in range(50):
        sent += 1  # still queued when the copy begins
    descriptors, buffers = tensors.encode([sent])
    sent.zero_()
    (got,) = tensors.decode(descriptors, buffers)
    assert bool((got == 50).all())


@gpu
@pytest.mark.gpu
def test_a_copy_on_a_stream_waits_for_that_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sent = torch.ones(5_000_000, device=CUDA)
        sent.mul_(3)
        got = travel(sent, device_map={CUDA: CUDA})
        assert bool((got * 2 == 6).all())


@gpu
@pytest.mark.gpu
def test_cuda_layouts_travel() -> None:
    base = torch.rand(4, 4, device=CUDA)
    sent = (base, base.t(), base[:, 1], base.to_sparse(), base.to_sparse_csr(), base.bfloat16())
    got = travel(sent, device_map={CUDA: CUDA})
    for mine, theirs in zip(sent, got, strict=True):
        assert (theirs.layout, theirs.device) == (mine.layout, CUDA)
        assert torch.equal(theirs.to_dense(), mine.to_dense())
    got[2][0] = 7
    assert got[0][0, 1] == got[1][1, 0] == 7


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17])
def test_copies_through_two_pinned_buffers(count: int) -> None:
    sent = torch.randint(0, 256, (count,), dtype=torch.uint8, device=CUDA)
    target = torch.zeros(count, dtype=torch.uint8)
    assert staging.to_host(sent, target) is target
    assert torch.equal(target, sent.cpu())
    back = staging.to_device(target, "cuda:0")
    target.zero_()  # the copy is complete
    assert torch.equal(back, sent)


@gpu
@pytest.mark.gpu
def test_host_memory_for_staging_is_pinned() -> None:
    assert staging.to_host(torch.ones(8, dtype=torch.uint8, device=CUDA)).is_pinned()
