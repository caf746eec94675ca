"""What changed in a parameter group."""

from __future__ import annotations

from typing import Any

import torch

from tensorplay.distributed.optim.options import changes, detached, replaced, snapshot, update


def test_only_what_changed_is_found() -> None:
    group = {"params": [1], "param_names": ["a"], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None}
    seen = snapshot(group)
    assert seen == {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}
    assert changes(group, seen) == {}
    group.update(lr=0.2, initial_lr=None)
    assert changes(group, seen) == {"lr": 0.2, "initial_lr": None}
    assert changes({"maximize": True}, {"maximize": 1}) == {"maximize": True}


def test_changes_in_place_are_found() -> None:
    group: dict[str, Any] = {"lr": torch.tensor(0.1), "milestones": [1, 2]}
    seen = snapshot(group)
    assert changes(group, seen) == {}
    group["lr"].fill_(0.2)
    group["milestones"].append(3)
    assert changes(group, seen).keys() == {"lr", "milestones"}
    assert changes({"lr": 0.2}, seen).keys() == {"lr"}


def test_replaced_values_are_found_by_identity() -> None:
    group = {"params": [], "lr": 0.1, "k": 1}
    before = dict(group)
    assert replaced(group, before) == {}
    group.update(k=2, new=None)
    assert replaced(group, before) == {"k": 2, "new": None}


def test_a_tensor_stays_the_same_object() -> None:
    rate = torch.tensor(0.1)
    group = {"lr": rate, "eps": 1.0}
    update(group, {"lr": torch.tensor(0.5), "eps": torch.tensor(2.0)})
    assert group["lr"] is rate
    assert rate == 0.5
    assert group["eps"] == 2.0


def test_detached_is_a_copy() -> None:
    kept: dict[str, Any] = {"a": [torch.ones(2, requires_grad=True)], "b": (1, "x")}
    copied = detached(kept)
    assert copied["b"] == (1, "x")
    assert not copied["a"][0].requires_grad
    copied["a"][0].zero_()
    assert kept["a"][0].sum() == 2
