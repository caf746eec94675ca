"""Gradients and parameters over several processes, compared with the same model locally."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.nn.utils import (
    all_parameters,
    clip_grad_norm_,
    clip_grad_value_,
    get_grads,
    get_total_grad_norm,
)
from tensorplay.distributed.rpc import RRef
from tests.optim.helpers import Twins, counted_calls

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_are_clipped_as_locally(norm_type: float, foreach: bool | None) -> None:
    twins = Twins()
    for max_norm in (0.5, 1e6):
        twins.backward()
        theirs = torch.nn.utils.clip_grad_norm_(twins.local, max_norm, norm_type, foreach=foreach)
        ours = clip_grad_norm_(iter(twins.spread), max_norm, norm_type, foreach=foreach)
        assert torch.equal(ours, theirs)
        twins.assert_same_grads()
    assert torch.equal(get_total_grad_norm(twins.spread, norm_type), ours)


def test_parameters_without_gradient_do_not_count() -> None:
    twins = Twins()
    assert clip_grad_norm_(twins.spread, 1.0) == 0.0
    twins.backward()
    rpc.rpc_sync("worker1", drop_grad, (twins.spread[2],))
    twins.local[2].grad = None
    theirs = torch.nn.utils.clip_grad_norm_(twins.local, 0.5)
    assert torch.equal(clip_grad_norm_(twins.spread, 0.5), theirs)
    twins.assert_same_grads()


def drop_grad(parameter: RRef[torch.Tensor]) -> None:
    parameter.local_value().grad = None


def test_clipping_is_two_round_trips_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    twins.backward()
    with counted_calls(monkeypatch) as called:
        clip_grad_norm_(twins.spread, 0.5)
        assert sorted(called) == ["worker0", "worker0", "worker1", "worker1"]
        del called[:]
        clip_grad_norm_(twins.spread, 1e6)
        assert sorted(called) == ["worker0", "worker1"]


def test_a_norm_that_is_not_finite() -> None:
    twins = Twins()
    twins.backward()
    for grads in ([p.grad for p in twins.local], get_grads(twins.spread)):
        assert grads[1] is not None
        grads[1][0, 0] = float("nan")
    before = [grad.clone() for grad in get_grads(twins.spread) if grad is not None]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(twins.spread, 0.5, error_if_nonfinite=True)
    for grad, kept in zip(get_grads(twins.spread), before, strict=True):
        assert grad is not None
        assert torch.equal(grad.nan_to_num(9), kept.nan_to_num(9))
    assert clip_grad_norm_(twins.spread, 0.5).isnan()
    assert all(g is not None and g.isnan().all() for g in get_grads(twins.spread))


@pytest.mark.parametrize("foreach", [None, False])
def test_values_are_clipped_as_locally(foreach: bool | None) -> None:
    twins = Twins()
    twins.backward()
    torch.nn.utils.clip_grad_value_(twins.local, 0.3, foreach)
    clip_grad_value_(twins.spread, 0.3, foreach)
    twins.assert_same_grads()


def hybrid() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns a model with a remote part and the same model without one."""

    def build(middle: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        first = torch.nn.Linear(3, 4)
        return torch.nn.ModuleDict(
            {"first": first, "middle": middle, "tied": first, "last": torch.nn.Linear(4, 2)}
        )

    return (
        build(RemoteModule("worker0/cpu", torch.nn.Linear, (4, 4))),
        build(torch.nn.Linear(4, 4)),
    )


def test_parameters_come_in_the_order_of_the_local_model() -> None:
    model, local = hybrid()
    ours = [p.to_here() if isinstance(p, RRef) else p for p in all_parameters(model)]
    assert [p.shape for p in ours] == [p.shape for p in local.parameters()]
    owners = [p.owner_name() if isinstance(p, RRef) else "" for p in all_parameters(model)]
    assert owners == ["", "", "worker0", "worker0", "", ""]
    remote = model["middle"]  # type: ignore[index]
    assert len(list(all_parameters(remote))) == 2


def test_handles_stand_for_their_parameters() -> None:
    model, _ = hybrid()
    remote = model["middle"]  # type: ignore[index]
    remote(torch.ones(1, 4)).sum().backward()
    grads = get_grads(remote)
    assert [grad is not None and tuple(grad.shape) for grad in grads] == [(4, 4), (4,)]
    assert torch.equal(grads[1], torch.ones(4))  # type: ignore[arg-type]
    norm = clip_grad_norm_([remote, *model["first"].parameters()], 0.1)  # type: ignore[index]
    assert torch.allclose(norm, torch.tensor(20.0).sqrt())
    assert get_grads(model["first"].weight) == [None]  # type: ignore[index]
