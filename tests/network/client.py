"""Training code on a host of its own, told what to do line by line.

``python -m tests.network.client BROKER``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, all_parameters
from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.errors import TensorPlayError
from tests.network.counting import count


def train() -> str:
    torch.manual_seed(0)
    first = RemoteModule("worker0", nn.Linear, (4, 16))
    model = nn.Sequential(first, nn.Tanh(), RemoteModule("worker1", nn.Linear, (16, 1)))
    optimizer = DistributedOptimizer(torch.optim.Adam, all_parameters(model), lr=0.02)
    x = torch.randn(64, 4)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return f"loss falls: {losses[-1] < 0.6 * losses[0]}"


def call_through() -> str:
    """A call that is under way, and many that follow it; each is run once, in order."""
    name = f"{time.monotonic()}"
    slow = rpc.rpc_async("worker0", count, (name + "slow", 2.0), timeout=50)
    print("under way", flush=True)
    answers = []
    end = time.monotonic() + 6.0
    while time.monotonic() < end:
        answers.append(rpc.rpc_sync("worker0", count, (name,), timeout=50))
        time.sleep(0.05)
    return f"{slow.wait()} {answers == list(range(1, len(answers) + 1))}"


def call_lost() -> str:
    """A call to a worker that is cut off for good."""
    print("under way", flush=True)
    started = time.monotonic()
    try:
        rpc.rpc_sync("worker0", time.sleep, (60.0,), timeout=55)
    except TensorPlayError as error:
        return f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}"
    return "no error"


def rejoin() -> str:
    """The worker comes back as what it was."""
    rpc.wait_for_workers(["worker0"], timeout=50)
    return f"sum {rpc.rpc_sync('worker0', torch.add, (torch.ones(1), 1), timeout=50).item()}"


COMMANDS: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (train, call_through, call_lost, rejoin)
}


if __name__ == "__main__":
    rpc.init_rpc("client", broker=sys.argv[1])
    rpc.wait_for_workers(["worker0", "worker1"], timeout=60)
    print("ready", flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "leave":
            break
        print(f"{command}: {COMMANDS[command]()}", flush=True)
    rpc.shutdown(graceful=False)
