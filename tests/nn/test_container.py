"""A handle as the child of a local module: torch's methods of the parent work."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tests.nn import modules
from tests.nn.modules import Container, Net, Versioned

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


@pytest.fixture
def hybrid() -> Any:
    return Container(RemoteModule("worker0", Net))


@pytest.fixture
def local() -> Any:
    return Container(Net())


LOCAL_NAMES = ["front.weight", "front.bias"]


def test_parameters_are_the_local_ones(hybrid: Any) -> None:
    assert [name for name, _ in hybrid.named_parameters()] == LOCAL_NAMES
    assert len(list(hybrid.parameters())) == 2
    assert list(hybrid.buffers()) == []
    assert list(hybrid.named_buffers()) == []


def test_modules_and_children_include_the_handle(hybrid: Any) -> None:
    assert [name for name, _ in hybrid.named_modules()] == ["", "front", "inner"]
    assert list(hybrid.modules()) == [hybrid, hybrid.front, hybrid.inner]
    assert list(hybrid.children()) == [hybrid.front, hybrid.inner]
    assert dict(hybrid.named_children())["inner"] is hybrid.inner
    assert hybrid.get_submodule("inner") is hybrid.inner
    twice = nn.Sequential(hybrid.inner, hybrid.inner)
    assert len(list(twice.modules())) == 2
    assert len(list(twice.modules(remove_duplicate=False))) == 3


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.float(),
        lambda m: m.type(torch.float64),
        lambda m: m.to(torch.float64),
        lambda m: m.to("meta"),
        lambda m: m.cpu(),
        lambda m: m.share_memory(),
        lambda m: m.to_empty(device="cpu"),
    ],
)
def test_conversions_move_the_local_part(hybrid: Any, local: Any, convert: Any) -> None:
    before = {name: value.dtype for name, value in hybrid.inner.remote_state_dict().items()}
    assert convert(hybrid) is hybrid
    convert(local)
    for (_, ours), (_, theirs) in zip(
        hybrid.named_parameters(), local.front.named_parameters(), strict=True
    ):
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
    after = hybrid.inner.remote_state_dict().items()
    assert {name: value.dtype for name, value in after} == before


def test_train_and_eval_reach_all_of_it(hybrid: Any) -> None:
    rref = hybrid.inner.module_rref
    for mode in (False, True):
        assert hybrid.train(mode) is hybrid
        assert hybrid.front.training is hybrid.inner.training is mode
        assert rpc.rpc_sync("worker0", modules.training_modes, (rref,)) == {mode}
    hybrid.eval()
    assert rpc.rpc_sync("worker0", modules.training_modes, (rref,)) == {False}


def test_repr_shows_the_handle(hybrid: Any) -> None:
    assert "(inner): RemoteModule(worker0/cpu, Net)" in repr(hybrid)


def test_apply_gives_the_handle_too(hybrid: Any) -> None:
    seen: list[nn.Module] = []
    assert hybrid.apply(seen.append) is hybrid
    assert seen == [hybrid.front, hybrid.inner, hybrid]


def test_gradients_are_switched_and_cleared_locally(hybrid: Any) -> None:
    hybrid(torch.ones(4, 3)).sum().backward()
    assert hybrid.front.weight.grad is not None
    hybrid.zero_grad()
    assert hybrid.front.weight.grad is None
    hybrid.requires_grad_(False)
    assert not hybrid.front.weight.requires_grad
    assert hybrid.inner.get_parameter("first.weight").requires_grad


def test_an_optimizer_of_the_local_part_makes_a_step(hybrid: Any) -> None:
    optimizer = torch.optim.SGD(hybrid.parameters(), lr=0.1)
    hybrid.eval()
    before = hybrid.front.weight.detach().clone()
    hybrid(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, hybrid.front.weight)


# The state dict is that of an all-local model.


def test_the_state_has_the_keys_order_and_versions_of_a_local_model(
    hybrid: Any, local: Any
) -> None:
    ours, theirs = hybrid.state_dict(), local.state_dict()
    assert list(ours) == list(theirs)
    assert ours._metadata == theirs._metadata
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }
    assert not any(value.requires_grad for value in ours.values())
    assert list(hybrid.state_dict(prefix="model.")) == [f"model.{name}" for name in ours]


def test_the_state_goes_from_local_to_hybrid_and_back_through_a_file(
    hybrid: Any, local: Any
) -> None:
    file = io.BytesIO()
    torch.save(local.state_dict(), file)
    file.seek(0)
    assert str(hybrid.load_state_dict(torch.load(file))) == "<All keys matched successfully>"
    local.eval(), hybrid.eval()
    x = torch.randn(4, 3)
    assert torch.allclose(hybrid(x), local(x))

    file = io.BytesIO()
    torch.save(hybrid.state_dict(), file)
    file.seek(0)
    other = Container(Net())
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.eval()(x), local(x))


def broken(state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    del state["inner.first.bias"]
    state["inner.block.1.weight"] = torch.ones(7, 7)
    state["inner.extra"] = state["inner.block.9.weight"] = torch.ones(1)
    return state


def test_what_does_not_fit_is_told_in_the_words_of_a_local_model(hybrid: Any, local: Any) -> None:
    state = broken(local.state_dict())
    with pytest.raises(RuntimeError) as theirs:
        local.load_state_dict(state)
    with pytest.raises(RuntimeError) as ours:
        hybrid.load_state_dict(state)
    assert str(ours.value) == str(theirs.value)


def test_without_strict_the_keys_that_do_not_fit_are_returned(hybrid: Any, local: Any) -> None:
    state = broken(local.state_dict())
    del state["inner.block.1.weight"]
    assert hybrid.load_state_dict(state, strict=False) == local.load_state_dict(state, strict=False)


def test_versions_of_the_remote_parts_are_known_to_them() -> None:
    def nested() -> nn.Sequential:
        return nn.Sequential(Versioned())

    hybrid, local = Container(RemoteModule("worker0", nested)), Container(nested())
    state = local.state_dict()
    hybrid.load_state_dict(state)
    assert torch.equal(hybrid.state_dict()["inner.0.weight"], torch.ones(2))
    for model in (hybrid, local):
        model.load_state_dict(dict(state))  # without versions, as of old
        assert torch.equal(model.state_dict()["inner.0.weight"], -torch.ones(2))


def test_assign_replaces_the_tensors(hybrid: Any, local: Any) -> None:
    state = {name: value.double() for name, value in local.state_dict().items()}
    hybrid.load_state_dict(state, assign=True)
    assert hybrid.inner.get_parameter("first.weight").dtype is torch.float64
    assert hybrid.inner.get_parameter("first.weight").requires_grad


def test_a_container_of_containers() -> None:
    inner = RemoteModule("worker0", nn.Linear, (3, 2))
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 1), inner])})
    assert list(model.state_dict()) == ["a.0.weight", "a.0.bias", "a.1.weight", "a.1.bias"]
    assert [name for name, _ in model.named_parameters()] == ["a.0.weight", "a.0.bias"]
    model.load_state_dict(model.state_dict())


def test_a_handle_that_came_over_the_wire_is_as_good(local: Any) -> None:
    handle = rpc.rpc_sync("worker1", modules.own_handle, (RemoteModule("worker0", Net),))
    model = Container(handle)
    assert [name for name, _ in model.named_parameters()] == LOCAL_NAMES
    model.load_state_dict(local.state_dict())
    assert torch.equal(model.state_dict()["inner.first.weight"], local.inner.first.weight)
    model.double().train().apply(lambda module: None).zero_grad()
    assert "RemoteModule" in repr(model)
