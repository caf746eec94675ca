"""Steps on the gradients of distributed autograd contexts."""

from __future__ import annotations

import threading

import pytest
import torch

from tensorplay.distributed import autograd, rpc
from tensorplay.distributed.optim import DistributedOptimizer, gradients
from tensorplay.distributed.rpc import RRef
from tests.optim.helpers import make_parameter, value

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def times(parameter: RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return parameter.local_value() * x


def test_the_gradients_of_the_context_are_used_and_grad_is_left_alone() -> None:
    first, second = (rpc.remote(name, make_parameter, (0,)) for name in ("worker0", "worker1"))
    here = make_parameter(0)
    optimizer = DistributedOptimizer(torch.optim.SGD, [first, here, second], lr=0.5)
    gradients.set_grads([first, here], [torch.full((3, 2), 7.0)] * 2)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker0", times, (first, here))
        autograd.backward(context_id, [y.sum()])
        optimizer.step(context_id)  # worker1 has no part in the graph
    expected = value(0) - 0.5 * value(0)
    assert torch.allclose(first.to_here(), expected)
    assert torch.allclose(here, expected)
    assert torch.equal(second.to_here(), value(0))
    grads = gradients.get_grads([first, here, second])
    assert torch.equal(grads[0], torch.full((3, 2), 7.0))  # type: ignore[arg-type]
    assert torch.equal(grads[1], torch.full((3, 2), 7.0))  # type: ignore[arg-type]
    assert grads[2] is None


def test_an_unknown_context_is_an_error() -> None:
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [rpc.remote("worker0", make_parameter, (0,))], lr=0.5
    )
    with pytest.raises(RuntimeError, match="context"):
        optimizer.step(12345)


def test_trainers_that_share_parameters_do_not_mix_gradients() -> None:
    parameter = rpc.remote("worker0", make_parameter, (0,))
    steps = 10

    def train(scale: float) -> None:
        optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=1.0)
        for _ in range(steps):
            with autograd.context() as context_id:
                y = rpc.rpc_sync("worker0", times, (parameter, torch.full((3, 2), scale)))
                autograd.backward(context_id, [y.sum()])
                optimizer.step(context_id)

    threads = [threading.Thread(target=train, args=(scale,)) for scale in (1.0, 16.0, 256.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    expected = value(0) - steps * (1.0 + 16.0 + 256.0)
    assert torch.allclose(parameter.to_here(), expected, rtol=1e-4)
