"""What a backward pass reaches, and how often: compared with the same module run here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.ways import WAYS, Way, assert_same_as_local

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


@every_way
def test_autograd_grad_leaves_the_parameters_alone(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        loss = way.call(module, x).square().sum()
        return torch.autograd.grad(loss, [x]), x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_backward_with_inputs_leaves_the_parameters_alone(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x, y = numbers(5, 3, requires_grad=True), numbers(5, 3, requires_grad=True, seed=2)
        way.call(module, x + y).square().sum().backward(inputs=[x])
        return x.grad, y.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_autograd_grad_of_an_inner_tensor(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        inner = x * 2
        y = way.call(module, inner)
        grads = torch.autograd.grad(y.square().sum(), [inner, y])
        return grads, x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_two_backwards_with_retain_graph(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        loss = way.call(module, x).square().sum()
        loss.backward(retain_graph=True)
        once = way.gradients(module)
        loss.backward()
        return once, x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_a_second_backward_without_it(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        loss = way.call(module, numbers(5, 3, requires_grad=True)).square().sum()
        loss.backward()
        loss.backward()

    kind, text = assert_same_as_local(program, way)
    assert kind is RuntimeError
    assert text.startswith("Trying to backward through the graph a second")


@every_way
def test_the_call_itself_says_that_it_was_used_up(way: Way) -> None:
    """No node of the caller's own has saved anything here."""

    def program(way: Way) -> Any:
        y = way.call(way.module(modules.Net), numbers(5, 3))
        y.backward(torch.ones_like(y))
        y.backward(torch.ones_like(y))

    kind, text = assert_same_as_local(program, way)
    assert kind is RuntimeError
    assert text.startswith("Trying to backward through the graph a second")


@every_way
def test_several_losses(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        y = way.call(module, x)
        y[:2].sum().backward(retain_graph=True)
        torch.autograd.backward([y.square().sum(), y.exp().mean()])
        return x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_a_backward_from_a_result_that_is_no_scalar(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        y = way.call(module, x)
        y.backward(numbers(5, 2, seed=3))
        return x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_accumulation_and_training(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        losses = []
        for step in range(6):
            loss = way.call(module, numbers(5, 3, seed=step)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if step % 2:
                way.ask(module, modules.sgd_step)
        return losses, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_gradients_of_gradients_of_an_input(way: Way) -> None:
    """The gradient penalty of a critic."""

    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        y = way.call(module, x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        before = way.gradients(module)
        loss = y.mean() + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        return gradient, before, x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_gradients_by_backward(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Plain)
        x = numbers(5, 3, requires_grad=True)
        way.call(module, x).square().sum().backward(create_graph=True)
        assert x.grad is not None
        first, x.grad = x.grad, None
        first.square().sum().backward()
        return first, x.grad

    assert_same_as_local(program, way)


@every_way
def test_third_derivatives(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        x = numbers(5, 3, requires_grad=True)
        y = way.call(module, x).sum()
        derivatives: list[Tensor] = []
        for _ in range(3):
            (derivative,) = torch.autograd.grad(y, x, create_graph=True)
            derivatives.append(derivative)
            y = derivative.square().sum()
        y.backward()
        return derivatives, x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_gradcheck(way: Way) -> None:
    module = way.module(modules.Net)
    x = numbers(2, 3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return way.call(module, x)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(function, [x])
    assert torch.autograd.gradgradcheck(function, [x])


@every_way
def test_detach_and_requires_grad_of_a_result(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        y = way.call(module, numbers(5, 3))
        cut = y.detach().requires_grad_()
        cut.square().sum().backward()
        before = way.gradients(module)
        y.backward(cut.grad)
        return before, cut.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_frozen_parameters(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        way.ask(module, modules.freeze)
        y = way.call(module, numbers(5, 3))
        x = numbers(5, 3, requires_grad=True)
        way.call(module, x).sum().backward()
        return y, x.grad, way.gradients(module)

    assert_same_as_local(program, way)
