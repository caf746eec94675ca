"""Data parallel trainers that share an embedding table on a server.

Each trainer, a worker, holds a replica of the dense part of a model in torch's
``DistributedDataParallel``, which averages its gradients over the trainers with gloo. The sparse
part, an embedding table, is on one further worker, and reached through a ``RemoteModule``. One
``loss.backward()`` does both: gradients of the replicas meet in DDP, those of the table add up
in ``.grad`` on the server, where one of the trainers steps them.

All of it equals the training of the same model on all the data in one process, which is checked.

    python examples/ddp_with_rpc.py [--steps 20] [--trainers 2]

on this machine, or with ``server``, ``trainer0``, ``trainer1``, ... that run elsewhere and reach
this machine as HERE:

    python examples/ddp_with_rpc.py --broker tcp://HOST:PORT --here HERE
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tensorplay
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer

ENTRIES, WIDTH, CLASSES = 50, 16, 4
LR = 0.5


def make_data() -> tuple[Tensor, Tensor]:
    """Returns examples, each three entries of the table, and the labels that follow from them."""
    indices = torch.randint(ENTRIES, (64, 3))
    return indices, indices.sum(1) * CLASSES // (3 * ENTRIES)


def train(
    rank: int,
    world_size: int,
    store: tuple[str, int],
    table: RemoteModule,
    dense: nn.Module,
    data: tuple[Tensor, Tensor],
    steps: int,
) -> list[float]:
    """Trains on a share of the data; runs on each of the trainers at the same time.

    Args:
        rank: Number of this trainer.
        world_size: How many there are.
        store: Host and port at which the trainers find each other.
        table: The sparse part, on the server.
        dense: The dense part; what arrives here is a copy.
        data: Indices of shape (N, 3) and labels of shape (N,), both int64.
        steps: How many to make.

    Returns:
        The loss of each step.
    """
    host, port = store
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore(host, port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        replica = DistributedDataParallel(dense)
        optimizer = torch.optim.SGD(replica.parameters(), lr=LR)
        # The trainers' gradients add up on the server, while DDP takes their mean.
        table_optimizer = DistributedOptimizer(
            torch.optim.SGD, table.remote_parameters(), lr=LR / world_size
        )
        indices, labels = data
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(replica(table(indices)), labels)
            loss.backward()
            optimizer.step()
            dist.barrier()  # all gradients are on the server
            if rank == 0:
                table_optimizer.step()
                table_optimizer.zero_grad()
            dist.barrier()  # all see the new table
            losses.append(loss.item())
        return losses
    finally:
        dist.destroy_process_group()


def train_alone(model: nn.Module, data: tuple[Tensor, Tensor], steps: int) -> list[float]:
    """Trains a model without remote parts on all the data; returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def joined(broker: str | None, names: list[str]) -> Iterator[None]:
    """Makes this process a client of the named workers, which it starts if there is no broker."""
    if broker is None:
        with tensorplay.local_cluster(names):
            yield
        return
    rpc.init_rpc("coordinator", broker=broker)
    try:
        rpc.wait_for_workers(names, timeout=60)
        yield
    finally:
        rpc.shutdown(graceful=False)


def main(broker: str | None, here: str, steps: int, number: int) -> None:
    """Has the trainers train, and compares their losses with those of one process."""
    torch.manual_seed(0)
    indices, labels = make_data()
    sparse = nn.EmbeddingBag(ENTRIES, WIDTH)
    dense = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    trainers = [f"trainer{index}" for index in range(number)]
    with joined(broker, ["server", *trainers]):
        table = RemoteModule("server", nn.EmbeddingBag, (ENTRIES, WIDTH))
        table.load_remote_state_dict(sparse.state_dict())
        # Port 0: any that is free. The store lives as long as this object.
        store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        futures: list[torch.futures.Future[list[float]]] = [
            rpc.rpc_async(
                name,
                train,
                args=(
                    rank,
                    number,
                    (here, store.port),
                    table,
                    dense,
                    (indices[rank::number], labels[rank::number]),
                    steps,
                ),
                timeout=0,
            )
            for rank, name in enumerate(trainers)
        ]
        losses = torch.tensor(torch.futures.wait_all(futures)).mean(0)
    alone = torch.tensor(train_alone(nn.Sequential(sparse, dense), (indices, labels), steps))
    for step in range(0, steps, 5):
        print(f"step {step:3}: loss {losses[step]:.5f}, of one process {alone[step]:.5f}")
    print(f"loss at first {losses[0]:.3f}, in the end {losses[-1]:.3f}")
    print(f"largest difference from the losses of one process: {(losses - alone).abs().max():.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", metavar="ADDRESS", help="use running workers at this broker")
    parser.add_argument("--here", metavar="HOST", default="127.0.0.1", help="this machine")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trainers", type=int, default=2)
    arguments = parser.parse_args()
    main(arguments.broker, arguments.here, arguments.steps, arguments.trainers)
