"""Handles whose worker dies and comes back; each test has a cluster of its own."""

from __future__ import annotations

import gc
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.errors import ConfigError, OwnerLostError, WorkerLostError
from tests.rpc import helpers, rref_helpers

pytestmark = pytest.mark.timeout(60)

Start = Callable[..., LocalCluster]
W0, W1 = "worker0", "worker1"


class Counter(nn.Module):
    """Has a buffer, a mode and an argument of its constructor."""

    count: torch.Tensor

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.tensor(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.weight + (0 if self.training else 100)


class Failing(nn.Module):
    """Can be made or not."""

    def __init__(self, possible: bool) -> None:
        super().__init__()
        if not possible:
            raise LookupError("not now")


class Waiting(nn.Module):
    """Waits for an event that nobody sets."""

    def forward(self) -> None:
        helpers.wait_event("never", 60.0)


def call_kept(x: torch.Tensor) -> Any:
    """Calls the handle that this process was given."""
    return rref_helpers.kept["handle"](x)


def lose(cluster: LocalCluster, name: str = W0) -> None:
    """Kills a worker and waits until this process knows of it."""
    cluster.kill(name)
    cluster.wait_ended(name)
    roster = rpc._get_current_rpc_agent().roster
    assert roster.wait_for(lambda: name not in [peer.name for peer in roster.all()], 30.0)


def lose_and_return(cluster: LocalCluster) -> None:
    lose(cluster)
    cluster.start_worker(W0)


def count(handle: RemoteModule) -> int:
    return int(handle.get_buffer("count"))


# By default.


def test_old_handles_and_references_never_reach_the_new_incarnation(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    handle = RemoteModule(W0, Counter)
    part = RemoteModule(W0, nn.Sequential, (nn.Linear(2, 2),)).get_submodule("0")
    parameter = handle.remote_parameters()[0]
    rref = rpc.remote(W0, helpers.who)
    rref.to_here()
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
    lose_and_return(cluster)
    assert rpc.rpc_sync(W0, helpers.who) == W0
    replacement = RemoteModule(W0, Counter)  # may well have the place and number of the old one
    uses: list[Callable[[], Any]] = [
        lambda: handle(torch.ones(2)),
        lambda: handle.forward(torch.ones(2)),
        lambda: handle.forward_async(torch.ones(2)),
        handle.remote_parameters,
        handle.remote_state_dict,
        lambda: handle.train(),
        lambda: part(torch.ones(2)),
        parameter.to_here,
        rref.to_here,
        rref.rpc_sync().upper,
        optimizer.step,
        lambda: rpc.rpc_sync(W0, rref_helpers.fetch, (rref,)),
        lambda: rpc.rpc_sync(W1, rref_helpers.fetch, (rref,)),
    ]
    for use in uses:
        begun = time.monotonic()
        with pytest.raises(OwnerLostError, match=W0):
            use()
        assert time.monotonic() - begun < 5.0, inspect.getsource(use)
    assert count(replacement) == 0


def test_a_checkpoint_is_for_handles_that_are_made_afresh(own_cluster: Start) -> None:
    own_cluster(workers=1)
    with pytest.raises(ConfigError, match="on_lost='recreate'"):
        RemoteModule(W0, Counter).checkpoint()
    for wrong in ("retry", None, True, ""):
        with pytest.raises(ConfigError, match="on_lost is 'raise' or 'recreate', got"):
            RemoteModule(W0, Counter, on_lost=wrong)  # type: ignore[arg-type]


# Made afresh.


def test_without_a_checkpoint_it_is_made_from_its_arguments(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    handle = RemoteModule(W0, Counter, (5,), on_lost="recreate")
    handle(torch.ones(2))
    assert count(handle) == 6
    lose_and_return(cluster)
    assert handle(torch.ones(2)).tolist() == [1.0, 1.0]
    assert count(handle) == 6
    assert W0 in repr(handle)


def test_the_last_checkpoint_and_the_mode_are_restored(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    handle = RemoteModule(W0, Counter, kwargs={"start": 5}, on_lost="recreate")
    for _ in range(2):
        handle(torch.ones(2))
        handle.checkpoint()
    handle(torch.ones(2))
    handle.eval()
    lose_and_return(cluster)
    assert count(handle) == 7
    assert handle(torch.ones(2)).tolist() == [101.0, 101.0]
    assert not handle.training
    lose_and_return(cluster)  # and again
    assert handle.forward_async(torch.ones(2)).wait().tolist() == [101.0, 101.0]
    assert count(handle) == 8


def test_training_goes_on_from_the_checkpoint(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    handle = RemoteModule(W0, nn.Linear, (3, 1), on_lost="recreate")
    twin = nn.Linear(3, 1)
    twin.load_state_dict(handle.remote_state_dict())
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    local = torch.optim.SGD(twin.parameters(), lr=0.1)

    def step(module: nn.Module, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def optimizer() -> DistributedOptimizer:
        return DistributedOptimizer(torch.optim.SGD, handle.remote_parameters(), lr=0.1)

    remote = optimizer()
    losses = [step(handle, remote) for _ in range(3)]
    handle.checkpoint()
    step(handle, remote)  # is lost
    loss = handle(x).square().sum()
    lose_and_return(cluster)
    with pytest.raises(WorkerLostError):
        loss.backward()  # the graph went with the worker
    with pytest.raises(OwnerLostError):
        remote.step()  # so did the parameters
    remote = optimizer()
    losses += [step(handle, remote) for _ in range(3)]
    torch.testing.assert_close(losses, [step(twin, local) for _ in range(6)])


def test_it_waits_for_its_worker(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    handle = RemoteModule(W0, Counter, on_lost="recreate")
    lose(cluster)
    results: list[torch.Tensor] = []
    callers = [
        threading.Thread(target=lambda: results.append(handle(torch.ones(2)))) for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    cluster.start_worker(W0)
    for caller in callers:
        caller.join(30.0)
    assert len(results) == 3
    assert count(handle) == 3  # one module for all of them


def test_it_waits_as_long_as_a_call_may_take(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    handle = RemoteModule(W0, Counter, on_lost="recreate")
    lose(cluster)
    rpc._set_rpc_timeout(0.2)
    begun = time.monotonic()
    with pytest.raises(OwnerLostError, match=r"worker0.*did not come back within 0.2 s"):
        handle(torch.ones(2))
    assert 0.2 <= time.monotonic() - begun < 5.0
    rpc._set_rpc_timeout(30.0)
    cluster.start_worker(W0)
    handle(torch.ones(2))


def test_a_call_in_flight_is_lost_all_the_same(own_cluster: Start) -> None:
    """Whether it has run is not known, so it is not run again."""
    cluster = own_cluster(workers=1)
    handle = RemoteModule(W0, Waiting, on_lost="recreate")
    future = handle.forward_async()
    cluster.kill(W0)
    with pytest.raises(WorkerLostError, match="died while running"):
        future.wait()


def test_a_constructor_that_fails_this_time(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    arguments = [True]
    handle = RemoteModule(W0, lambda: Failing(arguments[0]), on_lost="recreate")
    lose_and_return(cluster)
    arguments[0] = False
    with pytest.raises(LookupError, match="not now"):
        handle.remote_parameters()
    arguments[0] = True
    assert handle.remote_parameters() == []


def test_a_checkpoint_that_does_not_fit(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    handle = RemoteModule(W0, nn.Sequential, (nn.Linear(2, 2),), on_lost="recreate")
    handle.set_submodule("0", nn.Linear(2, 3))
    handle.checkpoint()
    lose_and_return(cluster)
    with pytest.raises(RuntimeError, match="size mismatch"):
        handle(torch.ones(2))


def test_the_handle_that_another_got_stays_lost(own_cluster: Start) -> None:
    cluster = own_cluster(workers=2)
    handle = RemoteModule(W0, Counter, on_lost="recreate")
    rpc.rpc_sync(W1, rref_helpers.keep, ("handle", handle))
    call = (call_kept, (torch.ones(2),))
    assert rpc.rpc_sync(W1, *call).tolist() == [1.0, 1.0]
    lose_and_return(cluster)
    handle(torch.ones(2))
    with pytest.raises(OwnerLostError, match=W0):
        rpc.rpc_sync(W1, *call)
    rpc.rpc_sync(W1, rref_helpers.keep, ("handle", handle))
    assert rpc.rpc_sync(W1, *call).tolist() == [1.0, 1.0]


def test_inside_a_local_model(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    model = nn.Sequential(nn.Linear(2, 2), RemoteModule(W0, Counter, (3,), on_lost="recreate"))
    lose_and_return(cluster)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert int(model.state_dict()["1.count"]) == 4


def test_a_dropped_handle_frees_its_module(own_cluster: Start) -> None:
    own_cluster(workers=1)
    handle = RemoteModule(W0, Counter, on_lost="recreate")
    handle(torch.ones(2))
    handle.checkpoint()
    gc.disable()
    try:
        del handle
        rrefs = rpc._get_current_rpc_agent().rrefs
        rref_helpers.wait_until(lambda: rrefs.stats()["rrefs_used"] == 0, "the module's end")
    finally:
        gc.enable()
