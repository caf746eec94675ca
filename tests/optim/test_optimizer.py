"""A distributed optimizer does what one optimizer over the same local parameters does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.optim import DistributedOptimizer, RemoteParameter
from tensorplay.distributed.rpc import RRef
from tensorplay.errors import ConfigError, SerializationError
from tests.optim.helpers import (
    FailsToStart,
    FailsToStep,
    Twins,
    Warming,
    counted_calls,
    make_parameter,
    same,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("cls", "options"), CLASSES)
def test_steps_are_those_of_a_local_optimizer(cls: Any, options: dict[str, Any]) -> None:
    twins = Twins()
    local, spread = twins.optimizers(cls, **options)
    for _ in range(3):
        twins.backward()
        local.step()
        spread.step()
        twins.assert_same()
    assert same(spread.state_dict(), local.state_dict())
    assert same(spread.defaults, local.defaults)
    local.zero_grad(set_to_none=False)
    spread.zero_grad(set_to_none=False)
    twins.assert_same_grads()
    local.zero_grad()
    spread.zero_grad()
    twins.assert_same_grads()


def test_a_step_is_one_call_to_each_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    with counted_calls(monkeypatch) as called:
        _, spread = twins.optimizers(torch.optim.Adam)
        assert sorted(called) == ["worker0", "worker1"]
        twins.backward()
        del called[:]
        spread.param_groups[0]["lr"] = 0.5
        spread.step()
        assert sorted(called) == ["worker0", "worker1"]
        del called[:]
        spread.zero_grad()
        assert sorted(called) == ["worker0", "worker1"]
        del called[:]
        spread.state_dict()
        assert sorted(called) == ["worker0", "worker1"]


def test_works_without_an_agent_on_local_parameters() -> None:
    parameter = make_parameter(0)
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], 0.5)
    parameter.grad = torch.ones(3, 2)
    before = parameter.detach().clone()
    optimizer.step()
    assert torch.equal(parameter, before - 0.5)


def test_groups_have_options_of_their_own() -> None:
    twins = Twins()
    names = [f"layer{number}" for number in range(5)]

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        named = list(zip(names, params, strict=True))
        return [
            {"params": named[:2], "lr": 0.5},
            {"params": [], "weight_decay": 3.0, "param_names": []},
            {"params": named[2:], "momentum": 0.5},
        ]

    local_groups, spread_groups = groups(twins.local), groups(twins.spread)
    for both in (local_groups, spread_groups):
        del both[1]
    local = torch.optim.SGD(local_groups, lr=0.1)
    spread = DistributedOptimizer(torch.optim.SGD, spread_groups, lr=0.1)
    for _ in range(2):
        twins.backward()
        local.step()
        spread.step()
    twins.assert_same()
    assert same(spread.state_dict(), local.state_dict())
    assert spread.param_groups[1]["param_names"] == names[2:]


def test_a_group_can_be_empty() -> None:
    twins = Twins()
    spread = DistributedOptimizer(
        torch.optim.SGD, [{"params": []}, {"params": twins.spread, "lr": 1.0}], lr=0.1
    )
    assert [group["lr"] for group in spread.param_groups] == [0.1, 1.0]
    spread.step()
    spread.load_state_dict(spread.state_dict())


def test_a_group_can_be_added() -> None:
    twins = Twins()
    local = torch.optim.Adam(twins.local[:2], lr=0.1)
    spread = DistributedOptimizer(torch.optim.Adam, twins.spread[:2], lr=0.1)
    twins.backward()
    local.step()
    spread.step()
    local.add_param_group({"params": twins.local[2:], "lr": 0.3})
    spread.add_param_group({"params": twins.spread[2:], "lr": 0.3})  # worker1 is new
    for _ in range(2):
        twins.backward()
        local.step()
        spread.step()
    twins.assert_same()
    assert same(spread.state_dict(), local.state_dict())


def inner_node() -> torch.Tensor:
    return make_parameter(0) * 2


def test_a_group_that_one_owner_refuses_is_not_added_anywhere() -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.SGD, lr=0.1, momentum=0.5)
    good, other = (rpc.remote(name, make_parameter, (9,)) for name in ("worker0", "worker2"))
    bad = rpc.remote("worker1", inner_node)
    with pytest.raises(ValueError, match="non-leaf"):
        spread.add_param_group({"params": [good, other, bad]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        spread.add_param_group({"params": [good, twins.spread[0]]})
    with pytest.raises(ValueError, match="names"):
        spread.add_param_group({"params": [("a", good), ("b", other)]})
    assert len(spread.param_groups) == 1
    twins.backward()
    local.step()
    spread.step()
    twins.assert_same()
    assert same(spread.state_dict(), local.state_dict())
    spread.add_param_group({"params": [good, other]})
    assert len(spread.param_groups) == 2
    spread.step()


def test_changed_options_hold_from_the_next_step() -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.Adam, lr=0.1)
    for step in range(3):
        for optimizer in (local, spread):
            optimizer.param_groups[0]["lr"] = 0.1 * step
            optimizer.param_groups[0]["betas"] = (0.5 + 0.1 * step, 0.9)
            optimizer.param_groups[0]["weight_decay"] = 0.1
        twins.backward()
        local.step()
        spread.step()
        twins.assert_same()


def test_options_that_the_optimizer_changes_are_seen() -> None:
    twins = Twins()
    local, spread = twins.optimizers(Warming, lr=0.1)
    for steps in range(1, 4):
        spread.param_groups[0]["lr"] = 0.1 / steps
        spread.step()
        local.step()
        assert spread.param_groups[0]["warmth"] == steps
    local.param_groups[0]["lr"] = spread.param_groups[0]["lr"]
    assert same(spread.state_dict(), local.state_dict())


def test_a_closure_runs_once_with_grad() -> None:
    twins = Twins()
    _, spread = twins.optimizers(torch.optim.SGD, lr=0.1)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        losses.append(torch.tensor(1.5 + len(losses)))
        return losses[-1]

    with torch.no_grad():
        assert spread.step(closure) == 1.5
        assert spread.step(closure=closure) == 2.5
    assert len(losses) == 2


def test_hooks_run_here() -> None:
    twins = Twins()
    _, spread = twins.optimizers(torch.optim.SGD, lr=0.1)
    calls: list[str] = []
    spread.register_step_pre_hook(lambda *_: calls.append("before"))
    spread.register_step_post_hook(lambda *_: calls.append("after"))
    spread.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    spread.register_load_state_dict_pre_hook(lambda *_: calls.append("loading"))
    spread.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    spread.step()
    spread.load_state_dict(spread.state_dict())
    assert calls == ["before", "after", "saved", "loading", "loaded"]


def test_what_its_class_raises_is_raised_here() -> None:
    twins = Twins()
    with pytest.raises(ArithmeticError, match="no start today"):
        DistributedOptimizer(FailsToStart, twins.spread)
    with pytest.raises(ValueError, match="learning rate"):
        DistributedOptimizer(torch.optim.SGD, twins.spread, lr=-1.0)
    with pytest.raises(TypeError):
        DistributedOptimizer(torch.optim.SGD, twins.spread, no_such_option=1)
    spread = DistributedOptimizer(FailsToStep, twins.spread, lr=0.1)
    with pytest.raises(ArithmeticError, match="no step today"):
        spread.step()


def test_what_cannot_be_optimized_is_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [])
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [{"params": []}])
    parameter = rpc.remote("worker0", make_parameter, (0,))
    with pytest.raises(TypeError, match="iterable"):
        DistributedOptimizer(torch.optim.SGD, parameter)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="RRefs of tensors"):
        DistributedOptimizer(torch.optim.SGD, [parameter, "weight"])
    with pytest.raises(TypeError, match="sets"):
        DistributedOptimizer(torch.optim.SGD, [{"params": {parameter}}])
    with pytest.raises(ValueError, match="names"):
        DistributedOptimizer(torch.optim.SGD, [("weight", parameter), parameter])
    with pytest.raises(TypeError, match="one to a str"):
        DistributedOptimizer(torch.optim.SGD, [rpc.remote("worker0", str, (1,))])


def test_it_stays_in_its_process() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [make_parameter(0)])
    with pytest.raises(SerializationError, match="state_dict"):
        optimizer.__getstate__()


def test_remote_parameters_stand_in_the_groups() -> None:
    twins = Twins()
    _, spread = twins.optimizers(torch.optim.SGD, lr=0.1)
    remote, local, _, _, own = spread.param_groups[0]["params"]
    assert isinstance(remote, RemoteParameter)
    assert remote.shape == (3, 2)
    assert remote.numel() == 6
    assert remote.requires_grad
    assert remote.rref is twins.spread[0]
    assert local is twins.spread[1]
    assert own is twins.spread[4].local_value()
    assert repr(remote) == "RemoteParameter((3, 2), dtype=torch.float32, owner='worker0')"
    assert "worker0" in repr(remote.grad)
    assert remote.grad.dtype == torch.float32
    assert remote.grad.shape == (3, 2)
    with pytest.raises(TypeError, match="get_grads"):
        remote.grad.norm()
    twins.backward()
    remote.grad = None
    assert rpc.rpc_sync("worker0", has_grad, (remote.rref,)) is False
    remote.grad = torch.ones(3, 2)
    assert rpc.rpc_sync("worker0", has_grad, (remote.rref,)) is True


def has_grad(parameter: RRef[torch.Tensor]) -> bool:
    return parameter.local_value().grad is not None


def rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_the_local_one(line_search: str | None) -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.LBFGS, lr=0.1, line_search_fn=line_search)

    def local_closure() -> torch.Tensor:
        local.zero_grad()
        loss = torch.stack([rosenbrock(p) for p in twins.local]).sum()
        loss.backward()
        return loss

    def spread_closure() -> torch.Tensor:
        spread.zero_grad()
        losses: list[torch.Tensor] = []
        for parameter in twins.spread:
            if isinstance(parameter, RRef) and not parameter.is_owner():
                owner = parameter.owner()
                losses.append(rpc.rpc_sync(owner, remote_rosenbrock, (parameter,)))
            else:
                own = parameter.local_value() if isinstance(parameter, RRef) else parameter
                loss = rosenbrock(own)
                loss.backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    for _ in range(3):
        theirs = local.step(local_closure)  # type: ignore[arg-type]
        assert spread.step(spread_closure) == theirs
        twins.assert_same()
    assert same(spread.state_dict(), local.state_dict())
    with pytest.raises(ConfigError, match=r"LBFGS.*closure"):
        spread.step()


def remote_rosenbrock(parameter: RRef[torch.Tensor]) -> torch.Tensor:
    loss = rosenbrock(parameter.local_value())
    loss.backward()
    return loss.detach()
