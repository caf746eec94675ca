"""The state of a distributed optimizer is that of a local one, and can be saved and loaded."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from tensorplay.distributed.optim import RemoteParameter
from tests.optim.helpers import Twins, same

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def train(twins: Twins, optimizers: Any, steps: int) -> None:
    for _ in range(steps):
        twins.backward()
        for optimizer in optimizers:
            optimizer.step()


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True, "foreach": True}])
def test_state_goes_from_one_to_the_other(options: dict[str, Any]) -> None:
    first = Twins()
    optimizers = first.optimizers(torch.optim.Adam, lr=0.1, **options)
    train(first, optimizers, 2)
    local_state, spread_state = (saved_and_loaded(o.state_dict()) for o in optimizers)
    assert same(local_state, spread_state)

    second = Twins()
    local, spread = second.optimizers(torch.optim.Adam, lr=0.7, **options)
    local.load_state_dict(spread_state)
    spread.load_state_dict(local_state)
    assert spread.param_groups[0]["lr"] == 0.1
    train(second, (local, spread), 2)
    second.assert_same()
    assert same(spread.state_dict(), local.state_dict())
    assert local.state_dict()["state"][0]["step"] == 4


def test_a_saved_state_does_not_change_any_more() -> None:
    twins = Twins(["worker0", "worker1"])
    _, spread = twins.optimizers(torch.optim.Adam)
    train(twins, [spread], 1)
    saved = spread.state_dict()
    kept = copy.deepcopy(saved)
    train(twins, [spread], 1)
    assert same(saved, kept)
    assert not same(spread.state_dict(), kept)


def test_state_is_a_mapping_from_parameters() -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.Adam)
    assert len(spread.state) == 0
    train(twins, (local, spread), 1)
    params = spread.param_groups[0]["params"]
    assert isinstance(params[0], RemoteParameter)
    assert len(spread.state) == 5
    assert set(spread.state) == set(params)
    for ours, theirs in zip(params, twins.local, strict=True):
        assert same(spread.state[ours], local.state[theirs])
        assert ours in spread.state
    assert len(list(spread.state.values())) == 5
    with pytest.raises(KeyError):
        spread.state[torch.ones(1)]


def test_what_does_not_fit_is_refused() -> None:
    twins = Twins()
    _, spread = twins.optimizers(torch.optim.Adam)
    state = spread.state_dict()
    with pytest.raises(ValueError, match="number of parameter groups"):
        spread.load_state_dict({"state": {}, "param_groups": state["param_groups"] * 2})
    group = {**state["param_groups"][0], "params": [0, 1]}
    with pytest.raises(ValueError, match="size of optimizer's group"):
        spread.load_state_dict({"state": {}, "param_groups": [group]})


def test_options_that_a_checkpoint_lacks_are_filled_in() -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.SGD, lr=0.1)
    state = spread.state_dict()
    del state["param_groups"][0]["nesterov"]  # older than the option
    spread.load_state_dict(state)
    assert spread.param_groups[0]["nesterov"] is False
    train(twins, (local, spread), 1)
    twins.assert_same()
