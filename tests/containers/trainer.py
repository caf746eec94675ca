"""Training code in a container: trains, and tells what it sees when others die.

The test reads its lines, kills a worker, and restarts the broker while this goes on.
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, all_parameters
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.errors import TensorPlayError, WorkerLostError

WORKERS = ["worker0", "worker1"]


def train(steps: int) -> None:
    torch.manual_seed(0)
    first = RemoteModule("worker0", nn.Linear, (4, 16))
    second = RemoteModule("worker1", nn.Linear, (16, 1))
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = DistributedOptimizer(torch.optim.Adam, all_parameters(model), lr=0.02)
    x = torch.randn(64, 4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


def wait_for_ever() -> None:
    while True:
        time.sleep(0.05)


def incarnation(name: str) -> int | None:
    """Returns which process has a name at present, if one has."""
    return next((peer.incarnation for peer in rpc.list_workers() if peer.name == name), None)


def wait_until_answered(worker: str) -> None:
    """Waits until a worker has found the restarted broker, as this process has."""
    while True:
        with contextlib.suppress(TensorPlayError):
            rpc.rpc_sync(worker, torch.ones, (1,), timeout=2)
            return


def main(broker: str, *, in_the_middle: bool) -> None:
    options = rpc.BrokerRpcBackendOptions(rpc_timeout=150.0)
    rpc.init_rpc("trainer", broker=broker, rpc_backend_options=options)
    rpc.wait_for_workers(WORKERS, timeout=60)
    gone = incarnation("worker0")
    train(40)

    # A big tensor there and back, as the first one between two hosts.
    large = torch.arange(8 << 20, dtype=torch.float32)
    assert torch.equal(rpc.rpc_sync("worker0", torch.neg, (large,)), -large)

    running = rpc.rpc_async("worker0", wait_for_ever)
    rpc.rpc_sync("worker0", torch.ones, (1,))  # it has begun: calls of one pair are in order
    print("trained: kill worker0", flush=True)
    try:
        running.wait()
    except WorkerLostError as error:
        print(f"WorkerLostError: {error}", flush=True)

    while incarnation("worker0") in (None, gone):  # until another process has that name
        time.sleep(0.05)
    train(40)
    print("trained again: restart the broker", flush=True)
    if not in_the_middle:
        sys.stdin.readline()  # it is restarted
        for worker in WORKERS:
            wait_until_answered(worker)
    train(400)
    rpc.shutdown(graceful=False)
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], in_the_middle="--in-the-middle" in sys.argv)
