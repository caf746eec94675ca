"""Moving the tensors of nested structures; meta stands for a device."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed.nn.api import _moving
from tensorplay.distributed.nn.api._moving import home_of, to_home, to_host
from tests.nn.modules import Batch, Pair

META = torch.device("meta")
X = torch.ones(2)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    derived: int = field(init=False, default=3)


@pytest.mark.parametrize(
    ("value", "pick"),
    [
        (X, lambda v: v),
        ([X, 1], lambda v: v[0]),
        ((1, X), lambda v: v[1]),
        ({"a": {"b": [X]}}, lambda v: v["a"]["b"][0]),
        (OrderedDict(a=X), lambda v: v["a"]),
        (Pair(X, X), lambda v: v.b),
        (Batch(X, "label"), lambda v: v.x),
        (Frozen(X), lambda v: v.x),
        ([Batch(X)], lambda v: v[0].x),
    ],
)
def test_tensors_move_and_the_structure_stays(value: Any, pick: Any) -> None:
    moved = to_home(value, META)
    assert type(moved) is type(value)
    assert pick(moved).device == META
    assert pick(moved).shape == X.shape
    assert pick(value) is X


def test_the_rest_of_a_structure_is_kept() -> None:
    batch = to_home(Batch(X, "label"), META)
    assert batch.label == "label"
    counts: Any = defaultdict(list, a=[X])
    assert to_home(counts, META).default_factory is list
    assert to_home(Frozen(X), META).derived == 3


@pytest.mark.parametrize("value", [1, "text", None, [1, 2], {"a": (1,)}, Batch("x"), torch.Tensor])  # type: ignore[arg-type]
def test_what_holds_no_tensor_is_the_same_object(value: Any) -> None:
    assert to_home(value, META) is value
    assert to_host(value) is value


def test_tensors_elsewhere_stay_where_they_are() -> None:
    there = torch.ones(2, device="meta")
    assert to_home([there], META)[0] is there
    assert to_host([there, X]) == [there, X]


def test_shared_tensors_stay_shared() -> None:
    a, (b,) = to_home((X, [X]), META)
    assert a is b


def test_a_structure_that_contains_itself_ends() -> None:
    value: list[Any] = [X]
    value.append(value)
    assert to_home(value, META)[0].device == META


def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_host() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)], enforce_sorted=True)
    moved = to_home(packed, META)
    assert isinstance(moved, nn.utils.rnn.PackedSequence)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_home_is_where_the_first_parameter_or_buffer_is() -> None:
    assert home_of(nn.Linear(1, 1, device="meta"), "cpu") == META
    assert home_of(nn.BatchNorm1d(1, affine=False, device="meta"), "cpu") == META
    assert home_of(nn.ReLU(), "cuda:1") == torch.device("cuda:1")


def test_what_moves_back_is_what_is_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return X

    monkeypatch.setattr(_moving, "_HOST_TYPES", ("cpu",))
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    there = torch.ones(2, device="meta")
    result = to_host({"a": [there], "b": Batch(X)})
    assert result["a"][0] is X
    assert result["b"].x is X
    assert len(moved) == 1
    assert moved[0] is there
