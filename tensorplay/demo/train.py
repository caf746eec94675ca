"""The training loop: ordinary PyTorch, whether the model is spread over processes or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from tensorplay.demo.data import Digits

BATCH = 64


class Optimizer(Protocol):
    """What the loop needs of an optimizer."""

    def zero_grad(self) -> None:
        """Clears the gradients."""

    def step(self) -> object:
        """Changes the parameters."""


def train(
    model: nn.Module,
    optimizer: Optimizer,
    digits: Digits,
    *,
    epochs: int,
    seed: int,
    on_step: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Trains a model and returns the loss of each step.

    Args:
        model: (N, 1, 8, 8) to (N, 10).
        optimizer: Of all its parameters.
        digits: What to learn.
        epochs: How often to go through it.
        seed: Of the order of the images.
        on_step: Is told each loss.
    """
    losses = []
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for images, labels in digits.batches(BATCH, generator):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            on_step(losses[-1])
    return losses


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Returns which share of the held-out digits a model recognises."""
    model.eval()
    with torch.no_grad():
        found = model(digits.held_out_images).argmax(dim=1)
    return float((found == digits.held_out_labels).float().mean())


def steps(digits: Digits, epochs: int) -> int:
    """Returns how many steps ``train`` takes."""
    return epochs * -(-len(digits.labels) // BATCH)
