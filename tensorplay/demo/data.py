"""Handwritten digits: 1,797 images of 8 x 8 pixels, bundled with scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Digits:
    """Images and labels, in two parts.

    Attributes:
        images: For training, float32 of shape (N, 1, 8, 8), from 0 to 1.
        labels: For training, int64 of shape (N,), from 0 to 9.
        held_out_images: For the test of what was learned.
        held_out_labels: The same.
    """

    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the training part once, shuffled, in batches."""
        order = torch.randperm(len(self.labels), generator=generator)
        for chosen in torch.split(order, size):
            yield self.images[chosen], self.labels[chosen]


def load(seed: int, held_out: float = 0.2) -> Digits:
    """Returns the digits, split at random but the same way for the same seed.

    Args:
        seed: Of the split.
        held_out: Which share is kept for the test.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the demo needs scikit-learn: pip install 'tensorplay-broker[demo]'"
        ) from error
    source = load_digits()
    images = torch.tensor(source.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(source.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    tests = int(len(labels) * held_out)
    test, train = order[:tests], order[tests:]
    return Digits(images[train], labels[train], images[test], labels[test])
