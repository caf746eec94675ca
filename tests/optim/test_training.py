"""The lines that train a local model train one with remote parts, with the same losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed.nn import (
    RemoteModule,
    all_parameters,
    clip_grad_norm_,
    clip_grad_value_,
    get_grads,
)
from tensorplay.distributed.optim import DistributedOptimizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def local_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))


def hybrid_model() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(4, 6),
        nn.Tanh(),
        RemoteModule("worker0", nn.Linear, (6, 6)),
        nn.ReLU(),
        RemoteModule("worker1/cpu", nn.Linear, (6, 1)),
    )
    model.load_state_dict(local_model().state_dict())
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


Clip = Callable[..., Any]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, params: list[Any], norm: Clip, limit: Clip
) -> list[float]:
    """Trains with all the trimmings; only what is handed in differs between the models."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        for part in range(2):  # gradients accumulate
            x, y = batch(2 * step + part)
            out = model(x)
            loss, other = (out - y).square().mean(), out.abs().mean()
            scaler.scale(loss).backward(retain_graph=True)
            scaler.scale(0.1 * other).backward()  # the same graph again
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        losses.append(norm(params, 0.5).item())
        limit(params, 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    losses.append(scaler.get_scale())
    losses += scheduler.get_last_lr()
    return losses


def test_with_accumulation_clipping_scaling_and_a_schedule() -> None:
    local, hybrid = local_model(), hybrid_model()
    ours, theirs = list(all_parameters(hybrid)), list(local.parameters())
    expected = train(
        local,
        torch.optim.SGD(theirs, lr=0.1, momentum=0.9),
        theirs,
        torch.nn.utils.clip_grad_norm_,
        torch.nn.utils.clip_grad_value_,
    )
    optimizer = DistributedOptimizer(torch.optim.SGD, ours, lr=0.1, momentum=0.9)
    found = train(hybrid, optimizer, ours, clip_grad_norm_, clip_grad_value_)
    assert found == pytest.approx(expected, rel=1e-4)
    for name, value in local.state_dict().items():
        torch.testing.assert_close(hybrid.state_dict()[name], value)


def test_gradients_are_with_the_owners_after_backward() -> None:
    local, hybrid = local_model(), hybrid_model()
    x, y = batch(0)
    for model in (local, hybrid):
        (model(x) - y).square().mean().backward()
    for ours, theirs in zip(get_grads(all_parameters(hybrid)), local.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)


def test_lbfgs_trains_a_hybrid_model() -> None:
    x, y = batch(0)

    def fit(model: nn.Module, optimizer: Any) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - y).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    local, hybrid = local_model(), hybrid_model()
    options = {"lr": 0.5, "max_iter": 4}
    expected = fit(local, torch.optim.LBFGS(local.parameters(), **options))  # type: ignore[arg-type]
    optimizer = DistributedOptimizer(torch.optim.LBFGS, all_parameters(hybrid), **options)
    assert fit(hybrid, optimizer) == pytest.approx(expected, rel=1e-3)
