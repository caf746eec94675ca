"""A small convolutional network in three parts, each made from a seed of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.rpc import RRef


def edges() -> nn.Module:
    """Returns the first part: (N, 1, 8, 8) to (N, 32, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    )


def shapes() -> nn.Module:
    """Returns the second part: (N, 32, 8, 8) to (N, 128)."""
    return nn.Sequential(
        nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(1024, 128), nn.ReLU(),
    )  # fmt: skip


def verdict() -> nn.Module:
    """Returns the last part: (N, 128) to (N, 10)."""
    return nn.Linear(128, 10)


class Seeded(nn.Module):
    """A module whose parameters depend on a seed alone, wherever it is made.

    Args:
        make: Makes the module.
        seed: Of its parameters.
    """

    def __init__(self, make: Callable[[], nn.Module], seed: int) -> None:
        super().__init__()
        torch.set_num_threads(1)  # sums are taken in the same order in every process
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inner = make()

    def forward(self, images: Tensor) -> Tensor:
        """Returns what the module makes of its input."""
        output: Tensor = self.inner(images)
        return output


class Classifier(nn.Module):
    """The three parts one after the other, wherever each of them is.

    Args:
        edges: The first part, a local module or a handle of a remote one.
        shapes: The second.
        verdict: The last.
    """

    def __init__(self, edges: nn.Module, shapes: nn.Module, verdict: nn.Module) -> None:
        super().__init__()
        self.edges = edges
        self.shapes = shapes
        self.verdict = verdict

    def forward(self, images: Tensor) -> Tensor:
        """Returns a score for each digit: (N, 1, 8, 8) to (N, 10)."""
        output: Tensor = self.verdict(self.shapes(self.edges(images)))
        return output


def local(seed: int) -> Classifier:
    """Returns the model with all its parts in this process."""
    return Classifier(Seeded(edges, seed), Seeded(shapes, seed + 1), Seeded(verdict, seed + 2))


def spread(seed: int, workers: list[str]) -> Classifier:
    """Returns the same model with its first two parts on two workers."""
    return Classifier(
        RemoteModule(f"{workers[0]}/cpu", Seeded, (edges, seed)),
        RemoteModule(f"{workers[1]}/cpu", Seeded, (shapes, seed + 1)),
        Seeded(verdict, seed + 2),
    )


def parameters(model: Classifier) -> list[nn.Parameter | RRef[nn.Parameter]]:
    """Returns the parameters of a model, those on workers as references."""
    found: list[nn.Parameter | RRef[nn.Parameter]] = []
    for part in model.children():
        found += part.remote_parameters() if isinstance(part, RemoteModule) else part.parameters()
    return found
