"""Tensors arrive as they were: dtype, layout, bits and flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.distributed.rpc import tensors
from tensorplay.errors import SerializationError
from tests.rpc.travel import assert_same, size, travel

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTIZED = [dtype for dtype in DTYPES if str(dtype).startswith(("torch.qint", "torch.quint"))]
PLAIN = [dtype for dtype in DTYPES if dtype not in QUANTIZED]


def numbered(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor whose bytes are all different, as far as bytes can be."""
    tensor = torch.empty(shape, dtype=dtype)
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    count = torch.arange(memory.numel()) % (2 if dtype is torch.bool else 251)
    memory.copy_(count)
    return tensor


# ------------------------------------------------------------------------------------------ dtypes


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (2, 3)], ids=str)
def test_every_dtype_travels(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = numbered(dtype, *shape)
    got = travel(sent)
    assert_same(sent, got)
    assert got.stride() == sent.stride()


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_tensors_quantized_as_a_whole_travel(dtype: torch.dtype) -> None:
    sent = torch.quantize_per_tensor(torch.linspace(-1, 1, 12).view(3, 4), 0.1, 3, dtype)
    got = travel(sent)
    assert (got.dtype, got.qscheme()) == (dtype, torch.per_tensor_affine)
    assert (got.q_scale(), got.q_zero_point()) == (0.1, 3)
    assert torch.equal(got.int_repr(), sent.int_repr())
    assert torch.equal(travel(sent.t()).dequantize(), sent.t().dequantize())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_tensors_quantized_per_channel_travel(dtype: torch.dtype, axis: int) -> None:
    whole = torch.linspace(-1, 1, 12).view(3, 4)
    scales = torch.linspace(0.05, 0.1, whole.shape[axis], dtype=torch.float64)
    zeros = torch.arange(whole.shape[axis])
    sent = torch.quantize_per_channel(whole, scales, zeros, axis, dtype)
    got = travel(sent)
    assert (got.dtype, got.q_per_channel_axis()) == (dtype, axis)
    assert torch.equal(got.q_per_channel_scales(), scales)
    assert torch.equal(got.q_per_channel_zero_points(), zeros)
    assert torch.equal(got.int_repr(), sent.int_repr())
    assert torch.equal(got.dequantize(), sent.dequantize())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.quint2x4], ids=str)
def test_float_scales_per_channel_travel(dtype: torch.dtype) -> None:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 1.0, 2.0])
    sent = torch.quantize_per_channel(torch.rand(3, 5), scales, zeros, 0, dtype)
    got = travel(sent)
    assert got.qscheme() == torch.per_channel_affine_float_qparams
    assert torch.equal(got.dequantize(), sent.dequantize())


def test_a_tensor_without_a_quantizer_is_refused() -> None:
    with pytest.raises(SerializationError):
        travel(torch.empty(3, dtype=torch.qint8))


def test_quantized_values_are_a_snapshot() -> None:
    sent = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)
    packed, buffers = tensors.encode([sent])
    sent.copy_(torch.quantize_per_tensor(torch.zeros(4), 0.5, 0, torch.qint8))
    assert tensors.decode(packed, buffers)[0].dequantize().tolist() == [1.0] * 4


# ------------------------------------------------------------------------------ requires_grad etc.


def test_requires_grad_of_a_leaf_is_kept() -> None:
    got = travel(torch.ones(2, requires_grad=True))
    assert got.requires_grad
    assert got.is_leaf


def test_requires_grad_of_a_result_is_kept_without_its_graph() -> None:
    got = travel(torch.ones(2, requires_grad=True) * 2)
    assert got.requires_grad
    assert got.is_leaf
    assert got.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_what_requires_no_gradient_requires_none(dtype: torch.dtype) -> None:
    assert not travel(torch.ones(2, dtype=dtype)).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_requires_grad_is_kept_in_every_mode(mode: Callable[[], Any]) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with mode():
        got = travel(leaf)
        plain = travel(torch.ones(2))
    assert got.requires_grad
    assert not got.is_inference()
    assert not plain.is_inference()
    plain.add_(1)


def test_inference_tensors_travel_and_arrive_as_usual_ones() -> None:
    with torch.inference_mode():
        sent = torch.ones(3)
    got = travel(sent)
    assert not got.is_inference()
    (got.requires_grad_() * 2).sum().backward()
    assert got.grad.tolist() == [2, 2, 2]


def test_received_tensors_can_be_written_to_under_autograd() -> None:
    base = torch.ones(4)
    whole, half = travel((base, base[:2]))
    weight = torch.ones(2, requires_grad=True)
    half.mul_(weight)
    half.sum().backward()
    assert weight.grad is not None
    whole.add_(1)


def test_parameters_and_buffers_keep_their_class() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    got = travel(parameter)
    assert type(got) is torch.nn.Parameter
    assert not got.requires_grad
    assert travel(torch.nn.Parameter(torch.ones(2))).requires_grad
    buffer = travel(torch.nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(buffer, torch.nn.Buffer)
    assert buffer.persistent is False
    assert travel(torch.nn.Buffer(torch.ones(2))).persistent is True


def test_attributes_of_a_parameter_are_kept() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = {"rank": torch.zeros(1)}  # type: ignore[attr-defined]
    assert travel(parameter).note["rank"].tolist() == [0]


def test_gradients_do_not_travel() -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    assert travel(leaf).grad is None


def test_lazy_parameters_travel() -> None:
    parameter, buffer = torch.nn.UninitializedParameter(), torch.nn.UninitializedBuffer()
    got = travel(parameter)
    assert type(got) is torch.nn.UninitializedParameter
    got.materialize((2, 2))
    assert type(travel(buffer)) is torch.nn.UninitializedBuffer
    lazy = travel(torch.nn.LazyLinear(3))
    assert lazy(torch.ones(1, 2)).shape == (1, 3)


# ------------------------------------------------------------------------------ conj and neg, meta


def test_the_conjugate_bit_is_kept() -> None:
    sent = torch.tensor([1 + 2j, 3 - 4j]).conj()
    got = travel(sent)
    assert_same(sent, got)
    assert got.is_conj()
    assert got.resolve_conj().tolist() == [1 - 2j, 3 + 4j]


def test_the_negative_bit_is_kept() -> None:
    sent = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert sent.is_neg()
    got = travel(sent)
    assert got.is_neg()
    assert got.tolist() == [-2.0, 4.0]


def test_a_tensor_and_its_conjugate_share_their_memory() -> None:
    base = torch.zeros(2, dtype=torch.complex64)
    plain, conjugate, imaginary = travel((base, base.conj(), base.conj().imag))
    plain[0] = 1 + 2j
    assert conjugate[0] == 1 - 2j
    assert imaginary[0] == -2


def test_conjugates_that_require_grad() -> None:
    got = travel(torch.ones(2, dtype=torch.complex64, requires_grad=True).conj())
    assert got.is_conj()
    assert got.requires_grad


def test_meta_tensors_have_no_bytes() -> None:
    sent = torch.empty(1000, 1000, device="meta", dtype=torch.bfloat16, requires_grad=True).t()
    got = travel(sent)
    assert (got.device.type, got.shape, got.stride()) == ("meta", sent.shape, sent.stride())
    assert got.dtype == torch.bfloat16
    assert got.requires_grad
    assert size(sent) < 1000


def test_a_meta_module_travels() -> None:
    got = travel(torch.nn.Linear(10_000, 10_000, device="meta"))
    assert got.weight.is_meta
    assert isinstance(got.weight, torch.nn.Parameter)


# ------------------------------------------------------------------------------------------ sparse

SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_sparse_tensors_travel(layout: str, dtype: torch.dtype) -> None:
    dense = torch.eye(4, dtype=dtype) * 3
    dense[1, 2] = 5
    sent = SPARSE[layout](dense)
    got = travel(sent)
    assert (got.layout, got.dtype, got.shape) == (sent.layout, sent.dtype, sent.shape)
    assert torch.equal(got.to_dense(), dense)


@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_tensors_without_elements_travel(layout: str) -> None:
    sent = SPARSE[layout](torch.zeros(4, 4))
    got = travel(sent)
    assert got.layout == sent.layout
    assert torch.equal(got.to_dense(), torch.zeros(4, 4))


@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_tensors_keep_requires_grad(layout: str) -> None:
    got = travel(SPARSE[layout](torch.eye(4)).requires_grad_())
    assert got.requires_grad
    assert got.is_leaf


def test_an_uncoalesced_tensor_stays_uncoalesced() -> None:
    indices, entries = torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 3.0])
    sent = torch.sparse_coo_tensor(indices, entries, (4,), check_invariants=True)
    got = travel(sent)
    assert not got.is_coalesced()
    assert got._nnz() == 3
    assert travel(sent.coalesce()).is_coalesced()
    assert got.to_dense().tolist() == [3, 3, 0, 0]


def test_hybrid_and_batched_sparse_tensors_travel() -> None:
    indices, entries = torch.tensor([[0, 2]]), torch.rand(2, 3)
    hybrid = torch.sparse_coo_tensor(indices, entries, (4, 3), check_invariants=True)
    assert torch.equal(travel(hybrid).to_dense(), hybrid.to_dense())
    batched = torch.eye(3).expand(2, 3, 3).to_sparse_csr()
    assert torch.equal(travel(batched).to_dense(), batched.to_dense())


def test_a_sparse_gradient_travels() -> None:
    bag = torch.nn.EmbeddingBag(10, 3, sparse=True)
    bag(torch.tensor([[1, 2], [1, 4]])).sum().backward()
    gradient = bag.weight.grad
    assert gradient is not None
    got = travel(gradient)
    assert got.is_sparse
    assert torch.equal(got.to_dense(), gradient.to_dense())


def test_sparse_parameters_keep_their_class() -> None:
    got = travel(torch.nn.Parameter(torch.eye(2).to_sparse()))
    assert isinstance(got, torch.nn.Parameter)
    assert got.is_sparse


def test_sparse_meta_tensors_are_refused() -> None:
    sent = torch.sparse_coo_tensor(
        torch.zeros(1, 2, dtype=torch.int64, device="meta"),
        torch.zeros(2, device="meta"),
        (4,),
        check_invariants=False,
    )
    with pytest.raises(SerializationError, match="meta"):
        travel(sent)
