"""A parameter server that answers its trainers when all of them have sent their gradients.

``update_and_fetch`` is marked with ``rpc.functions.async_execution``: it returns a future at
once, which frees the thread that served the call, and the caller gets its answer when the
future is complete. The last trainer of a round makes the step for all of them. So a server of
any number of trainers needs no thread for each of those that wait.

    python examples/batch_async_execution.py [--steps 60] [--trainers 3] [--threads 1]

on this machine, or with ``server``, ``trainer0``, ``trainer1``, ... that run elsewhere:

    python examples/batch_async_execution.py --broker tcp://HOST:PORT
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import tensorplay
from tensorplay.distributed import rpc

BATCH = 32


class BatchServer:
    """Owns the model; lives on the worker ``server``."""

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer.zero_grad()
        self.lock = threading.Lock()
        self.arrived = 0
        self.updated: torch.futures.Future[nn.Module] = torch.futures.Future()

    def fetch(self) -> nn.Module:
        """Returns the model; the caller gets a copy."""
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(
        server: rpc.RRef[BatchServer], gradients: list[Tensor]
    ) -> torch.futures.Future[nn.Module]:
        """Adds gradients, and gives the model as it is when all trainers have added theirs."""
        self = server.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                share = gradient / self.trainers
                parameter.grad = share if parameter.grad is None else parameter.grad + share
            self.arrived += 1
            updated = self.updated
            if self.arrived == self.trainers:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.arrived, self.updated = 0, torch.futures.Future()
                # Answers all trainers, with the model as it is while the lock is held.
                updated.set_result(self.model)
        return updated


def make_model() -> nn.Module:
    """Returns a small network from 8 numbers to one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def train(server: rpc.RRef[BatchServer], seed: int, steps: int) -> list[float]:
    """Trains on batches of its own; runs on a trainer. Returns the losses."""
    generator = torch.Generator().manual_seed(seed)
    model = server.rpc_sync().fetch()
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, 8, generator=generator)
        y = x.sum(1, keepdim=True).div(3).sin()
        loss = nn.functional.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        model = rpc.rpc_sync(
            server.owner(), BatchServer.update_and_fetch, args=(server, list(gradients))
        )
        losses.append(loss.item())
    return losses


@contextmanager
def joined(broker: str | None, names: list[str], threads: int) -> Iterator[None]:
    """Makes this process a client of the named workers, which it starts if there is no broker."""
    if broker is None:
        with tensorplay.local_cluster(names, threads=threads):
            yield
        return
    rpc.init_rpc("coordinator", broker=broker)
    try:
        rpc.wait_for_workers(names, timeout=60)
        yield
    finally:
        rpc.shutdown(graceful=False)


def main(broker: str | None, steps: int, number: int, threads: int) -> None:
    """Has all trainers train at the same time, and prints their mean loss."""
    names = [f"trainer{index}" for index in range(number)]
    with joined(broker, ["server", *names], threads):
        server = rpc.remote("server", BatchServer, args=(number,))
        futures: list[torch.futures.Future[list[float]]] = [
            rpc.rpc_async(name, train, args=(server, seed, steps), timeout=0)
            for seed, name in enumerate(names)
        ]
        losses = torch.tensor(torch.futures.wait_all(futures)).mean(0)
    for step in range(0, steps, 5):
        print(f"step {step:3}: loss {losses[step]:.3f}")
    print(f"loss at first {losses[0]:.3f}, in the end {losses[-5:].mean():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", metavar="ADDRESS", help="use running workers at this broker")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each worker started here")
    arguments = parser.parse_args()
    main(arguments.broker, arguments.steps, arguments.trainers, arguments.threads)
