"""Tensors of subclasses, in containers, and those that cannot travel."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.distributed.rpc import tensors
from tensorplay.errors import SerializationError
from tests.rpc.travel import travel, values

# -------------------------------------------------------------------------------------- subclasses


class Tagged(torch.Tensor):
    """A subclass with attributes."""

    unit: list[Any]
    me: Tagged


class Pair(torch.Tensor):
    """A wrapper of two tensors."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        return made

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(function)


def test_subclasses_keep_class_and_attributes() -> None:
    sent = torch.ones(3).as_subclass(Tagged)
    sent.unit = ["metre", torch.zeros(1)]
    got = travel(sent)
    assert type(got) is Tagged
    assert got.unit[0] == "metre"
    assert got.unit[1].tolist() == [0]
    assert got.tolist() == [1, 1, 1]


@pytest.mark.parametrize("grad", [False, True])
def test_subclasses_keep_requires_grad(grad: bool) -> None:
    got = travel(torch.ones(3).as_subclass(Tagged).requires_grad_(grad))
    assert got.requires_grad is grad
    assert got.is_leaf


def test_a_subclass_that_refers_to_itself() -> None:
    sent = torch.ones(1).as_subclass(Tagged)
    sent.me = sent
    got = travel(sent)
    assert got.me is got


def test_wrapper_subclasses_travel_by_their_parts() -> None:
    shared = torch.arange(3.0)
    got = travel(Pair(shared, shared))
    assert type(got) is Pair
    assert got.first is got.second
    assert got.first.tolist() == [0, 1, 2]


def test_a_parameter_of_a_subclass() -> None:
    sent = torch.nn.Parameter(torch.ones(2).as_subclass(Tagged))
    got = travel(sent)
    assert type(got) is type(sent)
    assert isinstance(got, torch.nn.Parameter)
    assert got.requires_grad


# -------------------------------------------------------------------------------------- containers


@dataclasses.dataclass
class Batch:
    data: torch.Tensor
    more: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Frozen:
    data: torch.Tensor


Point = collections.namedtuple("Point", ["x", "y"])


class Holder:
    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def test_tensors_travel_in_any_container() -> None:
    one = torch.arange(3)
    sent = {
        "list": [one],
        "tuple": (one, {"deep": [one]}),
        "data class": Batch(one, [one]),
        "frozen": Frozen(one),
        "named tuple": Point(one, 1),
        "object": Holder(one),
        "ordered": collections.OrderedDict(a=one),
        "default": collections.defaultdict(list, a=[one]),
        "partial": functools.partial(torch.add, one),
        "closure": lambda other: one + other,
        one.dtype: {1: one},
    }
    got = travel(sent)
    (first,) = got["list"]
    assert first.tolist() == [0, 1, 2]
    assert got["tuple"][0] is got["tuple"][1]["deep"][0] is first
    assert got["data class"].data is got["data class"].more[0] is first
    assert got["frozen"].data is got["named tuple"].x is got["object"].inside is first
    assert got["ordered"]["a"] is got["default"]["a"][0] is got[torch.int64][1] is first
    assert got["partial"](1).tolist() == got["closure"](1).tolist() == [1, 2, 3]


def test_modules_and_optimizers_travel() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    got_layer, got = travel((layer, optimizer))
    assert got.param_groups[0]["params"][0] is got_layer.weight
    for mine, theirs in zip(layer.parameters(), got_layer.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_packed_sequences_and_generators() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert torch.equal(travel(packed).data, packed.data)
    assert travel(torch.Size([1, 2])) == torch.Size([1, 2])
    assert travel(torch.device("cpu")) == torch.device("cpu")


# --------------------------------------------------------------------------------- refused layouts


def _nested_strided() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _nested_jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "nested": (_nested_strided, "nested"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "mkldnn"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_other_layouts_are_refused_by_name_and_path(kind: str) -> None:
    make, name = REFUSED[kind]
    sent = make()
    with pytest.raises(TypeError, match=name) as info:
        travel((print, ({"batch": [1, sent]},), {}))
    assert isinstance(info.value, SerializationError)
    assert "args[0]['batch'][1]" in str(info.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("where", ["attribute", "closure", "alone", "twice"])
def test_a_refused_tensor_is_found_wherever_it_is(where: str) -> None:
    nested = _nested_strided()
    sent = {
        "attribute": Holder(nested),
        "closure": lambda: nested,
        "alone": nested,
        "twice": [nested, nested],
    }[where]
    with pytest.raises(SerializationError, match="nested"):
        travel(sent)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_jagged_tensors_travel() -> None:
    sent = _nested_jagged()
    got = travel(sent)
    assert got.layout is torch.jagged
    for mine, theirs in zip(sent.unbind(), got.unbind(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_tensor_whose_memory_was_freed_is_refused() -> None:
    sent = torch.ones(10)
    sent.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="no memory"):
        travel(sent)


def test_tensors_inside_of_transforms_are_refused() -> None:
    with pytest.raises(SerializationError, match="cannot"):
        torch.func.vmap(lambda x: travel(x))(torch.ones(3, 2))


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        sent = torch.ones(3)
    with pytest.raises(SerializationError, match="fake"):
        travel(sent)


def test_check_says_what_encode_would() -> None:
    tensors.check([torch.ones(3)])
    with pytest.raises(SerializationError, match="mkldnn"):
        tensors.check([torch.ones(3), torch.ones(2, 2).to_mkldnn()])


def test_helper_compares_bytes() -> None:
    assert values(torch.tensor([1, 2], dtype=torch.int16)) == [1, 0, 2, 0]
