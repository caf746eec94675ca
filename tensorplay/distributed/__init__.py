"""Distributed training: calls, autograd, optimizers and modules on other processes."""

from __future__ import annotations

from tensorplay.distributed import rpc
from tensorplay.distributed import autograd  # isort: skip  # hooks itself into rpc
from tensorplay.distributed import nn, optim  # isort: skip
from tensorplay.distributed.remote_device import _remote_device

__all__ = ["_remote_device", "autograd", "nn", "optim", "rpc"]
