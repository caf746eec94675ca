"""Stop the training of a model with remote layers, and go on later from a checkpoint.

The middle layers live on two workers. A checkpoint is what it is for a local model: the state
of the model, of the optimizer and of the learning rate scheduler, in one file that
``torch.save`` writes. All of it also loads into the same model without remote parts.

    python examples/checkpoint_resume.py [--steps 20] [--stop-after 8]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import tensorplay
from tensorplay.distributed.nn import RemoteModule
from tensorplay.distributed.nn.utils import all_parameters, clip_grad_norm_
from tensorplay.distributed.optim import DistributedOptimizer

STEPS = 20


def build_model() -> nn.Sequential:
    """Returns a model of four layers, two of them on workers."""
    model = nn.Sequential(
        nn.Linear(8, 16),
        RemoteModule("worker0", nn.Linear, (16, 16)),
        nn.ReLU(),
        RemoteModule("worker1", nn.Linear, (16, 16)),
        nn.ReLU(),
        nn.Linear(16, 1),
    )
    model.load_state_dict(build_local_model().state_dict())  # begins with the same parameters
    return model


def build_local_model() -> nn.Sequential:
    """Returns the same model without remote parts."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 1),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs and targets of a step, the same in every run."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(256, 8, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def train(checkpoint: Path, until: int) -> list[float]:
    """Trains from the checkpoint, if there is one, up to a step, and saves a checkpoint.

    Args:
        checkpoint: The file.
        until: The number of the step after the last one.

    Returns:
        The loss of each step.
    """
    model = build_model()
    optimizer = DistributedOptimizer(torch.optim.AdamW, all_parameters(model), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"]
    losses = []
    for step in range(first, until):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(all_parameters(model), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": until,
        },
        checkpoint,
    )
    return losses


def main(steps: int = STEPS, stop_after: int = 8) -> tuple[list[float], list[float]]:
    """Trains without a stop, and with one between two clusters.

    Returns:
        The losses of both.
    """
    with tempfile.TemporaryDirectory() as directory:
        with tensorplay.local_cluster(workers=2):
            whole = train(Path(directory, "whole.pt"), steps)
        with tensorplay.local_cluster(workers=2):
            parts = train(Path(directory, "parts.pt"), stop_after)
        with tensorplay.local_cluster(workers=2):  # other processes, which know of nothing
            parts += train(Path(directory, "parts.pt"), steps)
        saved = torch.load(Path(directory, "parts.pt"), weights_only=True)
    local = build_local_model()
    local.load_state_dict(saved["model"])
    torch.optim.AdamW(local.parameters()).load_state_dict(saved["optimizer"])
    for step, (a, b) in enumerate(zip(whole, parts, strict=True)):
        note = "  <- stopped and resumed" if step == stop_after else ""
        print(f"step {step:3}: without a stop {a:.6f}, with one {b:.6f}{note}")
    return whole, parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--stop-after", type=int, default=8)
    arguments = parser.parse_args()
    without, with_stop = main(arguments.steps, arguments.stop_after)
    # Equal but for rounding, which depends on where a tensor happens to lie in memory.
    if not torch.allclose(torch.tensor(without), torch.tensor(with_stop), rtol=1e-4):
        raise SystemExit("the losses differ")
