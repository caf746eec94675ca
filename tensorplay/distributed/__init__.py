"""Distributed training: calls, autograd, optimizers and modules on other processes."""

from __future__ import annotations

from tensorplay.distributed import autograd, nn, optim, rpc
from tensorplay.distributed.remote_device import _remote_device

__all__ = ["_remote_device", "autograd", "nn", "optim", "rpc"]
