"""Processes that ``torchrun`` starts: a fixed world, or an elastic one.

``torchrun`` says in the environment who is who. Rank 0 starts the broker and the others find
it, so that no address is given.

    torchrun --nproc-per-node 3 examples/torchrun_world.py

A fixed world begins when all of its processes are there and ends when all of them have called
``shutdown``; in between each may call any other. Rank 0 trains a model with a layer on each.

    torchrun --nproc-per-node 3 examples/torchrun_world.py --elastic

An elastic one begins with its first process. Rank 0 shares work out to whoever is there; in the
middle a process that ``torchrun`` knows nothing of joins, and leaves again.

Without ``torchrun``, ``--broker ADDRESS`` adds a process to a world whose broker runs already:

    RANK=0 WORLD_SIZE=2 python examples/torchrun_world.py --broker tcp://HOST:PORT
    RANK=1 WORLD_SIZE=2 python examples/torchrun_world.py --broker tcp://HOST:PORT
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, all_parameters
from tensorplay.distributed.optim import DistributedOptimizer

STEPS = 20


def fixed(rank: int, world_size: int, broker: str | None) -> None:
    """Joins, leads or serves, and leaves when all do."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, broker=broker)
    if rank == 0:
        train(world_size)
    rpc.shutdown()  # waits until all have called it, and serves in the meantime


def train(world_size: int) -> None:
    """Trains a model with a layer on each process, this one included."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for rank in range(world_size):
        layers += [RemoteModule(f"rank:{rank}", nn.Linear, (8, 8)), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    optimizer = DistributedOptimizer(torch.optim.Adam, all_parameters(model), lr=0.02)
    x = torch.randn(64, 8)
    y = x.mean(1, keepdim=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"a fixed world of {world_size}", flush=True)
    print(f"loss at first {losses[0]:.3f}, in the end {losses[-1]:.3f}", flush=True)


def elastic(rank: int, world_size: int, broker: str | None) -> None:
    """Joins, leads or serves, and leaves without waiting for the others."""
    rpc.init_rpc(f"worker{rank}", rank=rank, broker=broker)  # no size: joins at once
    if rank == 0:
        lead(world_size)
    elif rank < world_size:
        rpc.wait_for_workers(["worker0"], timeout=60)
        wait_until_gone("worker0")
    else:
        sys.stdin.read()  # ends when the one who started it closes it
    rpc.shutdown()


def lead(world_size: int) -> None:
    """Shares work out to whoever is there: first as many as at the start, then one more."""
    rpc.wait_for_workers([f"worker{rank}" for rank in range(world_size)], timeout=60)
    share_out(1000)
    # The same script with a rank that torchrun has given to none; it could run anywhere.
    guest = subprocess.Popen([sys.executable, *sys.argv, "--guest"], stdin=subprocess.PIPE)
    rpc.wait_for_workers([f"worker{world_size}"], timeout=60)
    share_out(1000)
    guest.communicate()  # tells it to leave, and waits
    wait_until_gone(f"worker{world_size}")
    share_out(1000)


def share_out(total: int) -> None:
    """Adds up the numbers below ``total``, a part of them on each process."""
    names = [peer.name for peer in rpc.list_workers()]
    futures: list[torch.futures.Future[Tensor]] = [
        rpc.rpc_async(name, torch.sum, args=(part,))
        for name, part in zip(names, torch.arange(total).chunk(len(names)), strict=True)
    ]
    parts = torch.futures.wait_all(futures)
    print(f"{', '.join(names)}: the sum is {sum(map(int, parts))}", flush=True)


def wait_until_gone(name: str) -> None:
    """Waits, while calls are answered, until a process has left."""
    while any(peer.name == name for peer in rpc.list_workers()):
        time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", metavar="ADDRESS", help="the broker, if one runs already")
    parser.add_argument("--elastic", action="store_true", help="join and leave at any time")
    parser.add_argument("--guest", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this with torchrun: see the top of the file")
    own_rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if arguments.guest:
        own_rank = size
    if arguments.elastic:
        elastic(own_rank, size, arguments.broker)
    else:
        fixed(own_rank, size, arguments.broker)
