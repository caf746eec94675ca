"""Checkpoints of models with remote parts are those of the same models without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.nn.utils import all_parameters
from tensorplay.distributed.optim import DistributedOptimizer
from tests.optim.helpers import same

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def build(remote: bool, seed: int) -> nn.Sequential:
    """Returns a model with parameters and buffers, those of a remote part included."""
    torch.manual_seed(seed)

    def place(worker: str, cls: Any, *args: Any) -> nn.Module:
        return RemoteModule(worker, cls, args) if remote else cls(*args)

    return nn.Sequential(
        nn.Linear(4, 6),
        nn.Tanh(),
        place("worker0", nn.BatchNorm1d, 6),
        place("worker1/cpu", nn.Linear, 6, 6),
        nn.Sequential(nn.Tanh(), nn.Linear(6, 1)),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_and_load(format: str, state: dict[str, Any], path: Path) -> dict[str, Any]:
    if format == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, path)
        loaded: dict[str, Any] = safetensors.load_file(path)
    else:
        torch.save(state, path)
        loaded = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("first_is_remote", [True, False], ids=["to local", "from local"])
def test_training_goes_on_where_it_was(format: str, first_is_remote: bool, tmp_path: Path) -> None:
    first = build(first_is_remote, seed=1)
    second = build(not first_is_remote, seed=2)
    optimizers = [
        DistributedOptimizer(torch.optim.Adam, all_parameters(model), lr=0.01)
        if remote
        else torch.optim.Adam(model.parameters(), lr=0.01)
        for model, remote in ((first, first_is_remote), (second, not first_is_remote))
    ]
    train(first, optimizers[0], 3)
    second.load_state_dict(save_and_load(format, first.state_dict(), tmp_path / "model"))
    optimizers[1].load_state_dict(
        save_and_load("torch", optimizers[0].state_dict(), tmp_path / "optimizer")
    )
    assert same(dict(first.state_dict()), dict(second.state_dict()))
    assert same(optimizers[0].state_dict(), optimizers[1].state_dict())
    # Where a tensor is aligned in memory decides how its last bit is rounded.
    losses = train(first, optimizers[0], 3)
    assert losses == pytest.approx(train(second, optimizers[1], 3), rel=1e-5)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
