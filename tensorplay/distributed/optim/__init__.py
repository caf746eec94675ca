"""Optimizing parameters of many processes as if they were of one."""

from __future__ import annotations

from tensorplay.distributed.optim.optimizer import DistributedOptimizer
from tensorplay.distributed.optim.remote_parameter import RemoteParameter

__all__ = ["DistributedOptimizer", "RemoteParameter"]
