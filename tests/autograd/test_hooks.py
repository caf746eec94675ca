"""Hooks, at the caller and on the worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.autograd import modules
from tests.autograd.modules import numbers
from tests.autograd.ways import LOCAL, WAYS, Handle, Way, assert_equal, assert_same_as_local

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)


@every_way
def test_hooks_on_tensors_of_the_caller(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        log: list[Any] = []
        x = numbers(5, 3, requires_grad=True)
        middle = x * 2
        middle.register_hook(lambda gradient: gradient * 3)
        result = way.call(module, middle)
        result.retain_grad()
        result.register_hook(lambda gradient: log.append(gradient.clone()))
        x.register_post_accumulate_grad_hook(lambda x: log.append(x.grad.clone()))
        result.square().sum().backward()
        return log, result.grad, x.grad, way.gradients(module)

    assert_same_as_local(program, way)


@every_way
def test_hooks_of_the_remote_module_run_there(way: Way) -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Hooked)
        x = numbers(5, 3, requires_grad=True) * 1
        way.call(module, x).square().sum().backward()
        return way.ask(module, modules.seen), way.gradients(module)

    log, _ = assert_same_as_local(program, way)
    assert log == ["bias", "input", "module", "weight"]


def test_backward_hooks_on_the_handle() -> None:
    def program(way: Way) -> Any:
        module = way.module(modules.Net)
        log: list[Any] = []

        def before(_: Any, outputs: Any) -> Any:
            log.append([g.clone() for g in outputs])
            return tuple(g * 2 for g in outputs)

        def after(_: Any, inputs: Any, outputs: Any) -> Any:
            log.append([g.clone() for g in (*inputs, *outputs)])
            return tuple(g * 5 for g in inputs)

        handles = [
            module.register_full_backward_pre_hook(before),
            module.register_full_backward_hook(after),
        ]
        x = numbers(5, 3, requires_grad=True)
        module(x).square().sum().backward()
        for handle in handles:
            handle.remove()
        module(x).sum().backward()
        return log, x.grad, way.gradients(module)

    assert_equal(program(Handle()), program(LOCAL))


def test_a_handle_between_local_modules() -> None:
    """A container sees the handle as any other child."""

    def program(way: Way) -> Any:
        model = torch.nn.Sequential(
            modules.make(torch.nn.Linear, (3, 3)), way.module(modules.Net), torch.nn.Tanh()
        )
        x = numbers(5, 3, requires_grad=True)
        model(x).square().sum().backward()
        return x.grad, [p.grad for p in model[0].parameters()], way.gradients(model[1])

    assert_equal(program(Handle()), program(LOCAL))
