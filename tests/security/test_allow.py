"""Workers that do not trust their callers, and callers that do not trust their workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorplay.cluster import ForkServerClient, LocalCluster, local_cluster
from tensorplay.distributed import autograd as dist_autograd
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.rpc import rref_proxy
from tensorplay.errors import NotAllowedError
from tests.security import served

ALLOWED = ("torch.nn", "torch.optim", "tests.security.served")


@pytest.fixture(scope="module")
def guarded(fork_server: ForkServerClient) -> Iterator[LocalCluster]:
    """A worker that loads only what is allowed, and one that trusts everybody."""
    with local_cluster(0, fork_server=fork_server) as cluster:
        cluster.start_worker("worker0", allow=ALLOWED)
        cluster.start_worker("worker1")
        yield cluster


def test_allowed_functions_and_classes(guarded: LocalCluster) -> None:
    assert rpc.rpc_sync("worker0", served.add, (1, 2)) == 3
    assert torch.equal(rpc.rpc_sync("worker0", served.add, (torch.ones(2), 1)), 2 * torch.ones(2))
    counter = rpc.remote("worker0", served.Counter, (5,))
    assert counter.rpc_sync().count() == 6
    assert counter.rpc_async().count().wait() == 7
    assert counter.remote().count().to_here() == 8
    assert rpc.remote("worker0", served.Counter.starting_at, (3,)).rpc_sync().count() == 4
    assert rpc.rpc_async("worker0", torch.nn.functional.relu, (-torch.ones(1),)).wait() == 0


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (os.system, ("echo pwned > pwned",)),
        (served.run, ("echo pwned > pwned",)),
        (served._private, ("pwned",)),
        (eval, ("1",)),
        (bytearray, (10**12,)),
        (torch.load, ("/etc/passwd",)),
        (torch.add, (1, 2)),
        (lambda: None, ()),
    ],
)
def test_everything_else_is_refused(
    guarded: LocalCluster, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for call in (rpc.rpc_sync, _remote):
        with pytest.raises(NotAllowedError, match="asked for by 'client' and refused"):
            call("worker0", function, args)
    assert not Path("pwned").exists()


def _remote(to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return rpc.remote(to, function, args).to_here()


@pytest.mark.parametrize("method", ["_secret", "__init_subclass__", "doubled", "missing"])
def test_methods_that_are_not_public_are_refused(guarded: LocalCluster, method: str) -> None:
    counter = rpc.remote("worker0", served.Counter)
    refused = pytest.raises(NotAllowedError, match=f"the method '{method}'")
    with refused:
        rref_proxy.call_sync(counter, method, 0)
    with refused:
        rref_proxy.call_async(counter, method, 0).wait()
    with refused:
        rref_proxy.call_remote(counter, method, 0).to_here()


def test_the_compiler_is_refused(guarded: LocalCluster) -> None:
    """Its options can name programs to run."""
    remote = RemoteModule("worker0", torch.nn.Linear, (2, 2))
    with pytest.raises(NotAllowedError, match="the method 'compile'"):
        remote.compile(options={"cpp.cxx": ("touch", "pwned")})
    with pytest.raises(NotAllowedError, match="the method 'compile'"):
        remote.get_module_rref().rpc_sync().compile()
    with pytest.raises(NotAllowedError):
        rpc.rpc_sync("worker0", torch.nn.Module.compile, (torch.nn.Linear(2, 2),))


def test_attributes_are_not_had_by_name(guarded: LocalCluster) -> None:
    remote = RemoteModule("worker0", torch.nn.Linear, (2, 2))
    from tensorplay.distributed.nn.api import _remote_ops as ops

    with pytest.raises(ValueError, match="no tensor is had with 'register_buffer'"):
        rpc.rpc_sync("worker0", ops._get_tensor, (remote.module_rref, "register_buffer", "x"))


def test_a_remote_module_works_as_without(guarded: LocalCluster) -> None:
    remote = RemoteModule("worker0", served.Net)
    local = torch.nn.Sequential(torch.nn.Linear(2, 2), remote)
    x = torch.ones(1, 2)
    local(x).sum().backward()
    assert local[0].weight.grad is not None
    state = remote.remote_state_dict()
    assert set(state) == {"layer.weight", "layer.bias"}
    remote.load_remote_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
    assert torch.equal(remote(x), torch.zeros(1, 2))
    remote.eval()
    remote.train()
    assert remote.get_parameter("layer.bias").shape == (2,)
    layer = remote.get_submodule("layer")
    assert layer(x).shape == (1, 2)
    remote.set_submodule("layer", torch.nn.Linear(2, 3))
    assert remote(x).shape == (1, 3)
    remote.register_module("other", torch.nn.Sequential(torch.nn.ReLU()))
    assert remote.get_submodule("other")(x).shape == (1, 2)
    assert len(remote.remote_parameters()) == 2
    # A handle as an argument, and inside of another remote module.
    outer = RemoteModule("worker0", torch.nn.Sequential, (torch.nn.Linear(2, 2),))
    outer.register_module("1", remote)
    assert outer(x).shape == (1, 3)


def test_training_works_as_without(guarded: LocalCluster) -> None:
    remote = RemoteModule("worker0", torch.nn.Linear, (2, 1))
    optimizer = DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=0.1)
    before = remote.get_parameter("weight").clone()
    remote(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, remote.get_parameter("weight"))
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group(
        {"params": RemoteModule("worker0", torch.nn.Linear, (1, 1)).remote_parameters(), "lr": 0.5}
    )
    with dist_autograd.context() as context_id:
        loss = remote(torch.ones(1, 2)).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


def test_an_optimizer_that_is_not_allowed_is_refused(guarded: LocalCluster) -> None:
    remote = RemoteModule("worker0", torch.nn.Linear, (2, 1))
    with pytest.raises(NotAllowedError, match="_Optimizer"):
        DistributedOptimizer(_Optimizer, remote.remote_parameters(), lr=0.1)


class _Optimizer(torch.optim.SGD):
    pass
