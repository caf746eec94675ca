"""``torch.amp.GradScaler`` works on a distributed optimizer as on a local one."""

from __future__ import annotations

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.nn.utils import clip_grad_norm_
from tensorplay.distributed.rpc import RRef
from tests.optim.helpers import Twins, counted_calls

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def spoil(parameter: RRef[torch.Tensor]) -> None:
    grad = parameter.local_value().grad
    assert grad is not None
    grad[1, 1] = float("inf")


def add_sparse_grad(parameter: RRef[torch.Tensor]) -> None:
    indices = torch.tensor([[0, 0], [1, 1]])
    values = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
    parameter.local_value().grad = torch.sparse_coo_tensor(indices, values, (3, 2))


def make_half(number: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float16))


@pytest.mark.parametrize("spoiled", [None, 1, 2], ids=["finite", "inf here", "inf there"])
@pytest.mark.parametrize("clipped", [False, True])
def test_scales_skips_and_updates(spoiled: int | None, clipped: bool) -> None:
    twins = Twins()
    local, spread = twins.optimizers(torch.optim.SGD, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in "ab"]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    for step in range(3):
        twins.backward()
        if spoiled is not None and step == 1:
            for grad in (twins.local[spoiled].grad,):
                assert grad is not None
                grad[1, 1] = float("inf")
            target = twins.spread[spoiled]
            if isinstance(target, RRef):
                rpc.rpc_sync(target.owner(), spoil, (target,))
            else:
                target.grad[1, 1] = float("inf")
        if clipped:
            scalers[0].unscale_(local)
            scalers[1].unscale_(spread)
            torch.nn.utils.clip_grad_norm_(twins.local, 0.01)
            clip_grad_norm_(spread.param_groups[0]["params"], 0.01)
        scalers[0].step(local)
        scalers[1].step(spread)
        for scaler in scalers:
            scaler.update()
        twins.assert_same()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[1].get_scale() != 64.0


def test_costs_one_more_call_to_each_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    _, spread = twins.optimizers(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    twins.backward()
    with counted_calls(monkeypatch) as called:
        scaler.step(spread)
    assert sorted(called) == ["worker0", "worker0", "worker1", "worker1"]


def test_infinities_of_sparse_gradients_are_found() -> None:
    from tensorplay.distributed.optim import gradients

    parameter = rpc.remote("worker0", make_half, (0,))
    rpc.rpc_sync("worker0", add_sparse_grad, (parameter,))
    assert gradients.unscale([parameter], 1.0)  # 60000 twice is beyond float16
    rpc.rpc_sync("worker0", add_sparse_grad, (parameter,))
    dense = rpc.remote("worker0", make_half, (1,))
    assert not gradients.unscale([dense], 1.0)
