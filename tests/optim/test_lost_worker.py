"""What an optimizer does when an owner of its parameters dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.nn.utils import clip_grad_norm_
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.errors import WorkerLostError
from tests.optim.helpers import make_parameter, value

pytestmark = pytest.mark.timeout(60)


class Deadly(torch.optim.SGD):
    """Kills its worker."""

    def step(self, closure: Any = None) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_dead_worker_is_named(own_cluster: Callable[..., LocalCluster]) -> None:
    own_cluster(workers=2)
    params = [rpc.remote(name, make_parameter, (0,)) for name in ("worker0", "worker1")]
    deadly = DistributedOptimizer(Deadly, params[1:], lr=0.1)
    both = DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    with pytest.raises(WorkerLostError, match="worker1"):
        deadly.step()  # while the call is under way
    for use in (both.step, both.zero_grad, both.state_dict):
        with pytest.raises(WorkerLostError, match="worker1"):
            use()
    with pytest.raises(WorkerLostError, match="worker1"):
        DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    with pytest.raises(WorkerLostError, match="worker1"):
        clip_grad_norm_(params, 1.0)
    DistributedOptimizer(torch.optim.SGD, params[:1], lr=0.1).step()
    assert torch.equal(params[0].to_here(), value(0))  # no step was made without worker1
