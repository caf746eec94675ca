"""What the workers of every system run."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def nothing() -> None:
    """Does nothing: what is left is the cost of the call."""


def swallow(tensor: Tensor) -> None:
    """Takes a tensor and lets it go."""


def double(tensor: Tensor) -> Tensor:
    """Returns a new tensor of the same size."""
    return tensor * 2


def echo(tensor: Tensor) -> Tensor:
    """Returns what it was given."""
    return tensor


def give(nbytes: int) -> Tensor:
    """Returns a tensor of that many bytes, made at the first call."""
    return payload(nbytes)


@cache
def _kept(nbytes: int) -> Tensor:
    # Written once, so that its pages are there; of float32, as most of what is sent.
    return torch.arange(nbytes // 4, dtype=torch.float32)


def payload(nbytes: int) -> Tensor:
    """Returns this process's tensor of that many bytes; the last one is kept.

    Args:
        nbytes: A multiple of 4.
    """
    if nbytes > _LARGE:
        _kept.cache_clear()
    return _kept(nbytes)


#: Of larger tensors only one is kept, so that a group fits into small machines.
_LARGE = 64 << 20
