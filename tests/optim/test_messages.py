"""What a training step sends: no more than it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tensorplay.distributed import autograd as dist_autograd
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.rpc import api

pytestmark = pytest.mark.usefixtures("cluster")

WORKERS = ("worker0", "worker1")
#: Requests by the name of who sent them and of who got them; the reply to each is a message, too.
requests: Counter[tuple[str, str]] = Counter()


def count_requests() -> None:
    """Counts the requests of this process from now on."""
    requests.clear()
    agent = api._get_current_rpc_agent()
    send = agent._caller._dispatch

    def counted(kind: Any, dst: int, *rest: Any) -> bool:
        peer = agent.peer_by_incarnation(dst)
        requests[agent.info.name, "nobody" if peer is None else peer.name] += 1
        return send(kind, dst, *rest)

    agent._caller._dispatch = counted


def taken() -> Counter[tuple[str, str]]:
    """Returns what was counted since the last time."""
    counted = Counter(requests)
    requests.clear()
    return counted


@pytest.fixture
def sent() -> Iterator[Callable[[], dict[tuple[str, str], int]]]:
    """Returns what all have sent since the last time, but for the asking."""
    processes = ("client", *WORKERS)
    plain = api._get_current_rpc_agent()._caller._dispatch
    for name in processes:
        rpc.rpc_sync(name, count_requests)

    def take() -> dict[tuple[str, str], int]:
        total = taken()
        for name in WORKERS:
            total += rpc.rpc_sync(name, taken)
        requests.clear()
        return dict(total)

    take()
    yield take
    api._get_current_rpc_agent()._caller._dispatch = plain


def test_one_message_each_way(sent: Callable[[], dict[tuple[str, str], int]]) -> None:
    layers = [RemoteModule(name, torch.nn.Linear, (8, 8)) for name in WORKERS]
    parameters = [rref for layer in layers for rref in layer.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    x = torch.ones(2, 8)
    to_each = {("client", name): 1 for name in WORKERS}
    for _ in range(2):
        sent()
        with dist_autograd.context() as context:
            hidden = layers[0](x)
            assert sent() == {("client", "worker0"): 1}
            loss = layers[1](hidden).sum()
            assert sent() == {("client", "worker1"): 1}
            dist_autograd.backward(context, [loss])
            assert sent() == to_each
            optimizer.step(context)
            assert sent() == to_each
        assert sent() == to_each  # the end of the context


def test_one_message_each_way_without_a_context(
    sent: Callable[[], dict[tuple[str, str], int]],
) -> None:
    layer = RemoteModule("worker0", torch.nn.Linear, (8, 8))
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)
    for _ in range(2):
        sent()
        layer(torch.ones(2, 8)).sum().backward()
        assert sent() == {("client", "worker0"): 2}
        optimizer.step()
        assert sent() == {("client", "worker0"): 1}


def test_functions_are_defined_once(sent: Callable[[], dict[tuple[str, str], int]]) -> None:
    agent = api._get_current_rpc_agent()
    send = agent._caller._dispatch
    definitions = []

    def look(kind: Any, dst: int, id: int, header: Any, frames: Any) -> bool:
        definitions.append((header.function > 0, bool(header.definition), len(frames)))
        return send(kind, dst, id, header, frames)

    agent._caller._dispatch = look
    for _ in range(2):
        assert rpc.rpc_sync("worker2", torch.mul, (3, 2)) == 6
    assert definitions == [(True, True, 1), (True, False, 1)]
