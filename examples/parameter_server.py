"""A parameter server and several trainers, in two ways.

The parameters live on the server, a worker. Trainers, further workers, pull the parameters
through autograd: what they compute with them is differentiable, and so the backward pass of a
trainer carries its gradients back to the server.

``--door contexts``: the trainers run independently of each other. Each keeps the gradients of a
step in a distributed autograd context of its own, and has a ``DistributedOptimizer`` that
applies them on the server. This is how it was written for ``torch.distributed.rpc``.

``--door plain``: ordinary ``loss.backward()``. The gradients of all trainers add up in ``.grad``
on the server, and this process steps one optimizer when all are done with their batch. Losses
are those of training on the joint batch in one process.

The data are the handwritten digits of scikit-learn (``pip install 'tensorplay-broker[demo]'``).

    python examples/parameter_server.py [--door contexts|plain] [--steps 60] [--trainers 2]

on this machine, or with ``server``, ``trainer0``, ``trainer1``, ... that run elsewhere:

    python examples/parameter_server.py --broker tcp://HOST:PORT
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import tensorplay
from tensorplay.distributed import autograd as dist_autograd
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.optim import DistributedOptimizer

BATCH = 64


class Network(nn.Sequential):
    """A classifier of images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def pull(self) -> dict[str, Tensor]:
        """Returns the parameters by name: all of them in one call."""
        return dict(self.named_parameters())


class Trainer:
    """Computes losses and gradients on its share of the data; lives on a worker."""

    def __init__(self, server: RemoteModule, images: Tensor, labels: Tensor, seed: int) -> None:
        self.server = server.get_module_rref()
        self.parameters = server.remote_parameters()
        self.images, self.labels = images, labels
        self.generator = torch.Generator().manual_seed(seed)
        self.skeleton = Network()  # only its forward is used, never its own parameters

    def loss(self) -> Tensor:
        """Returns the loss of a random batch, computed with the server's parameters."""
        chosen = torch.randint(len(self.images), (BATCH,), generator=self.generator)
        parameters = self.server.rpc_sync().pull()
        output = torch.func.functional_call(self.skeleton, parameters, (self.images[chosen],))
        return nn.functional.cross_entropy(output, self.labels[chosen])

    def add_gradients(self, weight: float) -> float:
        """Adds the gradients of one batch to ``.grad`` on the server."""
        loss = self.loss()
        (weight * loss).backward()
        return loss.item()

    def train_with_contexts(self, steps: int, lr: float) -> list[float]:
        """Trains alone, unaware of the other trainers; returns the losses."""
        optimizer = DistributedOptimizer(torch.optim.SGD, self.parameters, lr=lr)
        losses = []
        for _ in range(steps):
            with dist_autograd.context() as context_id:
                loss = self.loss()
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
        return losses


def through_contexts(trainers: list[rpc.RRef[Trainer]], steps: int) -> list[float]:
    """Has all trainers train at the same time; returns the mean loss of each step."""
    futures = [
        trainer.rpc_async(timeout=0).train_with_contexts(steps, lr=0.2) for trainer in trainers
    ]
    losses: Tensor = torch.tensor(torch.futures.wait_all(futures))
    return losses.mean(0).tolist()


def through_plain_backward(
    server: RemoteModule, trainers: list[rpc.RRef[Trainer]], steps: int
) -> list[float]:
    """Has all trainers do a batch, then steps, and so on; returns the mean loss of each step."""
    optimizer = DistributedOptimizer(torch.optim.SGD, server.remote_parameters(), lr=0.4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        futures = [trainer.rpc_async().add_gradients(1 / len(trainers)) for trainer in trainers]
        losses.append(sum(torch.futures.wait_all(futures)) / len(trainers))
        optimizer.step()
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


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns images and labels for the training, and others for the test."""
    from sklearn.datasets import load_digits

    source = load_digits()
    order = torch.randperm(len(source.target))
    images = torch.tensor(source.data, dtype=torch.float32).div(16)[order]
    labels = torch.tensor(source.target)[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def main(broker: str | None, door: str, steps: int, number: int) -> None:
    """Trains through one of the doors and prints losses and accuracy."""
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    names = [f"trainer{index}" for index in range(number)]
    with joined(broker, ["server", *names]):
        server = RemoteModule("server", Network)
        trainers = [
            rpc.remote(name, Trainer, args=(server, images[i::number], labels[i::number], i))
            for i, name in enumerate(names)
        ]
        if door == "contexts":
            losses = through_contexts(trainers, steps)
        else:
            losses = through_plain_backward(server, trainers, steps)
        with torch.no_grad():
            right = server(test_images).argmax(1) == test_labels
    for step in range(0, steps, 10):
        print(f"step {step:3}: loss {losses[step]:.3f}")
    print(f"loss at first {losses[0]:.3f}, in the end {losses[-1]:.3f}")
    print(f"accuracy on {len(right)} other digits: {right.float().mean():.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", metavar="ADDRESS", help="use running workers at this broker")
    parser.add_argument("--door", choices=("contexts", "plain"), default="contexts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trainers", type=int, default=2)
    arguments = parser.parse_args()
    main(arguments.broker, arguments.door, arguments.steps, arguments.trainers)
