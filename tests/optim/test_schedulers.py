"""Torch's learning rate schedulers drive a distributed optimizer as they do a local one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.optim.helpers import Twins, same

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_same_rates_and_steps(name: str, lr: Any) -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.Adam, lr=lr)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (local, spread)]
    for _ in range(6):
        twins.backward()
        local.step()
        spread.step()
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        twins.assert_same()
    assert same(spread.state_dict(), local.state_dict())


def test_momentum_is_cycled() -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.SGD, lr=0.1, momentum=0.9)
    schedulers = [lr_scheduler.OneCycleLR(o, 0.2, total_steps=8) for o in (local, spread)]
    momenta = set()
    for _ in range(6):
        twins.backward()
        local.step()
        spread.step()
        for scheduler in schedulers:
            scheduler.step()
        momenta.add(spread.param_groups[0]["momentum"])
        twins.assert_same()
    assert len(momenta) > 3


def test_reduce_on_plateau() -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.SGD, lr=0.1)
    schedulers = [lr_scheduler.ReduceLROnPlateau(o, patience=1) for o in (local, spread)]
    for metric in (1.0, 1.0, 1.0, 1.0, 1.0):
        twins.backward()
        local.step()
        spread.step()
        for scheduler in schedulers:
            scheduler.step(metric)
        twins.assert_same()
    assert spread.param_groups[0]["lr"] == local.param_groups[0]["lr"] < 0.1
