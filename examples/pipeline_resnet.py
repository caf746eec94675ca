"""A small residual network in two shards on two workers, with micro-batches in a pipeline.

A batch is cut into micro-batches. While the second worker computes on one of them the first
computes on the next. What the first shard returns stays on its worker as an ``RRef``, and goes
from there straight to the second worker, not by way of this process; gradients return the
same way. The shards normalise by groups within an example, so that the loss does not depend on
how the batch is cut, which is checked.

    python examples/pipeline_resnet.py [--steps 8] [--batch 32] [--splits 1 4]

on this machine, or with ``worker0`` and ``worker1`` that run elsewhere:

    python examples/pipeline_resnet.py --broker tcp://HOST:PORT
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import tensorplay
from tensorplay.distributed import rpc
from tensorplay.distributed.nn import RemoteModule, all_parameters
from tensorplay.distributed.optim import DistributedOptimizer

CLASSES = 5


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        self.around = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y: Tensor = torch.relu(self.body(x) + self.around(x))
        return y


class Shard(nn.Module):
    """A part of the network, which takes its input by reference."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: rpc.RRef[Tensor]) -> Tensor:
        """Fetches the input from where it is, and computes."""
        y: Tensor = self.layers(x.to_here())
        return y


class FirstShard(Shard):
    """The convolutions at the full size."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 16, 3, padding=1), Block(16, 16), Block(16, 16))


class SecondShard(Shard):
    """The convolutions at half the size, and the classifier."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            Block(16, 32, stride=2),
            Block(32, 32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, CLASSES),
        )


class PipelinedResNet(nn.Module):
    """Both shards, through which the parts of a batch go one behind the other."""

    def __init__(self, workers: list[str], splits: int) -> None:
        super().__init__()
        self.splits = splits
        self.first = RemoteModule(workers[0], FirstShard)
        self.second = RemoteModule(workers[1], SecondShard)

    def forward(self, images: Tensor) -> Tensor:
        """Maps (N, 3, H, W) to logits of shape (N, CLASSES)."""
        first = self.first.get_module_rref()
        outputs: list[torch.futures.Future[Tensor]] = []
        for part in images.chunk(self.splits):
            hidden = first.remote().forward(rpc.RRef(part))  # stays on its worker
            outputs.append(self.second.forward_async(hidden))
        return torch.cat(torch.futures.wait_all(outputs))


def train(workers: list[str], splits: int, steps: int, batch: int) -> list[float]:
    """Trains a new model and returns the loss of each step."""
    model = PipelinedResNet(workers, splits)
    optimizer = DistributedOptimizer(torch.optim.Adam, all_parameters(model), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    # Noise, of a strength that tells the class.
    images = torch.randn(batch, 3, 16, 16, generator=generator) + labels.view(-1, 1, 1, 1)
    losses, started = [], time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rate = steps * batch / (time.perf_counter() - started)
    print(
        f"{splits} micro-batches: losses {losses[0]:.4f} to {losses[-1]:.4f}, {rate:.0f} images/s"
    )
    return losses


@contextmanager
def joined(broker: str | None, names: list[str]) -> Iterator[None]:
    """Makes this process a client of the named workers, which it starts if there is no broker."""
    if broker is None:
        with tensorplay.local_cluster(names):
            yield
        return
    rpc.init_rpc("trainer", broker=broker)
    try:
        rpc.wait_for_workers(names, timeout=60)
        yield
    finally:
        rpc.shutdown(graceful=False)


def main(broker: str | None, steps: int, batch: int, splits: list[int]) -> None:
    """Trains with each number of micro-batches and compares the losses."""
    workers = ["worker0", "worker1"]
    with joined(broker, workers):
        runs = torch.tensor([train(workers, number, steps, batch) for number in splits])
    print(f"loss at first {runs[0, 0]:.3f}, in the end {runs[0, -1]:.3f}")
    print(
        f"largest difference between the first losses: {(runs[:, 0] - runs[0, 0]).abs().max():.1e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", metavar="ADDRESS", help="use running workers at this broker")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    main(arguments.broker, arguments.steps, arguments.batch, arguments.splits)
