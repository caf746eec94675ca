"""Values and gradients of a call, compared with those of the same module run here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.ways import WAYS, Way, assert_same_as_local

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


@every_way
@pytest.mark.parametrize("input_has_gradient", [True, False])
@pytest.mark.parametrize("cls", [modules.Net, modules.Plain])
def test_inputs_and_parameters(
    way: Way, cls: type[torch.nn.Module], input_has_gradient: bool
) -> None:
    def program(way: Way) -> Any:
        module = way.module(cls)
        x = numbers(5, 3, requires_grad=input_has_gradient)
        y = way.call(module, x)
        if y.requires_grad:
            y.square().sum().backward()
        return y, x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_no_input_at_all(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Generator)
        y = way.call(module, 4)
        y.sum().backward()
        return y, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_nested_inputs_and_outputs(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Nested)
        x, y = numbers(2, 3, requires_grad=True), numbers(3, requires_grad=True, seed=2)
        result = way.call(module, x, {"y": y, "other": [1, "two"]}, scale=0.5)
        loss = (
            result["pair"].left.sum()
            + result["pair"].right[0].prod()
            + result["record"].value.square().sum()
            + result["tuple"][1][0].sum()
        )
        loss.backward()
        return result, x.grad, y.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_outputs_that_the_loss_does_not_use(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Nested)
        x, y = numbers(2, 3, requires_grad=True), numbers(3, requires_grad=True, seed=2)
        way.call(module, x, {"y": y})["pair"].right[0].sum().backward()
        return x.grad, y.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
@pytest.mark.parametrize("used", range(6))
def test_an_output_that_is_an_input_or_a_view_of_one(way: Way, used: int) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Echo)
        x, y = numbers(3, 3, requires_grad=True), numbers(3, 3, requires_grad=True, seed=2)
        outputs = way.call(module, x * 1, y * 1)
        outputs[used].square().sum().backward()
        return outputs, x.grad, y.grad

    assert_same_as_local(program, way)


@every_way
def test_all_of_such_outputs_together(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Echo)
        x, y = numbers(3, 3, requires_grad=True), numbers(3, 3, requires_grad=True, seed=2)
        sum(output.square().sum() for output in way.call(module, x, y)).backward()
        return x.grad, y.grad

    assert_same_as_local(program, way)


@every_way
def test_writing_into_an_output(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        y = way.call(module, x)
        y.mul_(3)
        y[0].zero_()
        y[1:3] = y[3:5].exp()
        y.square().sum().backward()
        return y, x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_writing_into_an_input_after_the_call(way: Way) -> None:
    """Locally, torch refuses where it has saved the input; remotely, the values were copied."""
    module = way.module(modules.Net)
    leaf = numbers(5, 3, requires_grad=True)
    x = leaf * 2
    y = way.call(module, x)
    x.zero_()
    y.sum().backward()

    other = numbers(5, 3, requires_grad=True)
    modules.make(modules.Net)(other * 2).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@every_way
def test_the_callee_writes_into_its_input(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.InPlace)
        x = numbers(2, 3, requires_grad=True)
        y = way.call(module, x * 1)
        y.sum().backward()
        return y, x.grad

    assert_same_as_local(program, way)


@every_way
def test_sparse_gradients(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(torch.nn.Embedding, 5, 2, None, None, 2.0, False, True)
        way.call(module, torch.tensor([1, 3, 1])).square().sum().backward()
        (gradient,) = way.gradients(module)
        assert gradient is not None
        assert gradient.is_sparse
        return gradient.to_dense()

    assert_same_as_local(program, way)


@every_way
@pytest.mark.parametrize("dtype", [torch.complex128, torch.float32, torch.bfloat16])
def test_other_dtypes(way: Way, dtype: torch.dtype) -> None:
    def program(way: Way) -> Any:
        x = numbers(2, 3).to(dtype).requires_grad_()
        y = way.call(way.module(modules.Plain), x)
        y.abs().sum().backward()
        return y, x.grad

    assert_same_as_local(program, way)


@every_way
def test_empty_and_zero_dimensional_tensors(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Plain)
        empty, single = numbers(0, 3, requires_grad=True), numbers(requires_grad=True)
        (way.call(module, empty).sum() + way.call(module, single)).backward()
        return empty.grad, single.grad

    assert_same_as_local(program, way)


def test_a_builtin_function() -> None:
    x, y = numbers(3, requires_grad=True), numbers(3, requires_grad=True, seed=2)
    rpc.rpc_sync("worker0", torch.mul, (x, y)).sum().backward()
    torch.testing.assert_close(x.grad, y.detach())
    torch.testing.assert_close(y.grad, x.detach())


def test_a_call_to_oneself() -> None:
    x = numbers(3, requires_grad=True)
    rpc.rpc_sync("client", modules.scaled, (x,)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0, dtype=torch.float64))
