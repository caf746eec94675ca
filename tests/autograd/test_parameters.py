"""Parameters that travel, tensors that share memory, and derivatives of other kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorplay.distributed import rpc
from tensorplay.distributed.autograd import nodes
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.ways import WAYS, Sync, Way, assert_equal, assert_same_as_local

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


def same(value: Any) -> Any:
    return value


def whole_and_part(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y[0]


def twice_and_thrice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


def write_into_second(x: Tensor, y: Tensor) -> Tensor:
    return x * y.mul_(2)


def test_a_parameter_as_an_argument_gets_its_gradient() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    rpc.rpc_sync("worker0", torch.matmul, args=(torch.ones(2, 4), weight)).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((4, 4), 2.0))


def test_a_module_travels_as_a_copy_with_parameters_of_its_own() -> None:
    net = modules.make(modules.Net)
    other = rpc.rpc_sync("worker0", same, args=(net,))
    assert all(type(p) is nn.Parameter and p.is_leaf for p in other.parameters())
    other(numbers(5, 3)).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", ["proxy", "to_here"])
def test_a_parameter_as_a_result_is_trained_at_its_owner(kind: str) -> None:
    net = rpc.remote("worker0", modules.make, (modules.Net,))
    twin = modules.make(modules.Net).get_parameter("first.weight")
    if kind == "proxy":
        weight = net.rpc_sync().get_parameter("first.weight")
    else:
        weight = net.remote().get_parameter("first.weight").to_here()
    weight.square().sum().backward()
    twin.square().sum().backward()
    assert_equal(Sync().gradients(net)[0], twin.grad)


def test_writing_into_results_that_share_memory_is_refused() -> None:
    """Torch would not know that the gradient of one is then another's, too."""
    x = numbers(3, 4, requires_grad=True)
    whole, part = rpc.rpc_sync("worker0", whole_and_part, args=(x,))
    with pytest.raises(RuntimeError, match="modified inplace"):
        whole.mul_(2)
    (whole.sum() + part.sum()).backward()
    expected = torch.full((3, 4), 2.0, dtype=torch.float64)
    expected[0] += 2
    torch.testing.assert_close(x.grad, expected)


def test_writing_into_one_of_several_results() -> None:
    x = numbers(3, requires_grad=True)
    one, other = rpc.rpc_sync("worker0", twice_and_thrice, args=(x,))
    one.mul_(5)
    (one * other).sum().backward()
    torch.testing.assert_close(x.grad, 60 * x.detach())


def test_a_callee_that_writes_into_inputs_that_share_memory_is_refused() -> None:
    x = numbers(3, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="modified inplace"):
        rpc.rpc_sync("worker0", write_into_second, args=(x, x.view(3)))


@every_way
def test_an_embedding_on_the_worker_with_sparse_gradients(way: Way) -> None:
    def program(way: Way) -> Any:
        table = way.module(torch.nn.EmbeddingBag, 8, 3)
        table_sparse = way.module(SparseBag)
        index = torch.tensor([[1, 2], [2, 5]])
        way.call(table, index).square().sum().backward()
        way.call(table_sparse, index).square().sum().backward()
        (gradient,) = way.gradients(table_sparse)
        assert gradient is not None
        return way.gradients(table), gradient.is_sparse, gradient.to_dense()

    assert_same_as_local(program, way)


class SparseTable(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(8, 3, sparse=True)


class SparseBag(nn.EmbeddingBag):
    def __init__(self) -> None:
        super().__init__(8, 3, sparse=True, mode="sum")


def test_an_embedding_here_with_sparse_gradients_through_a_call() -> None:
    tables = [modules.make(SparseTable) for _ in range(2)]
    index = torch.tensor([1, 2, 2])
    net = rpc.remote("worker0", modules.make, (modules.Net,))
    rpc.rpc_sync("worker0", modules.place, (net, tables[0](index))).sum().backward()
    modules.make(modules.Net)(tables[1](index)).sum().backward()
    got, expected = (table.get_parameter("weight").grad for table in tables)
    assert got is not None
    assert expected is not None
    assert got.is_sparse
    torch.testing.assert_close(got.to_dense(), expected.to_dense())


def test_a_sparse_tensor_as_an_argument() -> None:
    s = torch.eye(3).to_sparse().requires_grad_()
    rpc.rpc_sync("worker0", torch.sparse.sum, args=(s * 2,)).backward()
    assert s.grad is not None
    torch.testing.assert_close(s.grad.to_dense(), 2 * torch.eye(3))


@every_way
def test_jacobian_and_hessian(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)

        def run(x: Tensor) -> Tensor:
            result: Tensor = way.call(module, x)
            return result

        x = numbers(3)
        return (
            torch.autograd.functional.jacobian(run, x),
            torch.autograd.functional.hessian(lambda x: run(x).square().sum(), x),
        )

    assert_same_as_local(program, way)


@every_way
def test_the_gradient_is_a_function_of_the_results_gradient_too(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x, v = numbers(5, 3, requires_grad=True), numbers(5, 2, requires_grad=True, seed=2)
        (gradient,) = torch.autograd.grad(way.call(module, x), x, v, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, v])

    assert_same_as_local(program, way)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@every_way
def test_backward_with_create_graph(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        way.call(module, x).square().sum().backward(create_graph=True)
        first, x.grad = x.grad, None
        assert first is not None
        second = torch.autograd.grad(first.sum(), x)
        return first.detach(), second, [g.detach() for g in way.gradients(module) if g is not None]

    assert_same_as_local(program, way)


@every_way
@pytest.mark.parametrize("route", ["backward", "grad", "create_graph"])
def test_results_on_an_accelerator(way: Way, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here only made out to be there: the node that waits is apart from that of the device."""

    def program(way: Way) -> Any:
        module = way.module(modules.Nested)
        x = numbers(4, 3, requires_grad=True)
        out = way.call(module, x, {"y": x + 1}, scale=2.0)
        loss = (out["pair"].left * out["record"].value).square().sum()
        if route == "grad":
            return torch.autograd.grad(loss, [x], retain_graph=True), way.gradients(module)
        if route == "create_graph":
            (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
            loss = loss + gradient.square().sum()
        loss.backward(retain_graph=route == "backward")
        if route == "backward":
            loss.backward()
        return x.grad, way.gradients(module)

    monkeypatch.setattr(nodes, "_is_on_host", lambda tensor: False)
    assert_same_as_local(program, way)


def test_a_value_of_the_callers_that_the_worker_fetches() -> None:
    """Its graph serves both the backward at the caller and the worker's."""
    x = numbers(5, 3, requires_grad=True)
    h = x.exp()
    y = rpc.rpc_sync("worker0", modules.fetched, (rpc.RRef(h),))
    (y.sum() + h.square().sum()).backward()
    other = numbers(5, 3, requires_grad=True)
    h = other.exp()
    (modules.scaled(h).sum() + h.square().sum()).backward()
    torch.testing.assert_close(x.grad, other.grad)
