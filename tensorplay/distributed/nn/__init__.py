"""Modules that live on a worker."""

from __future__ import annotations

from tensorplay.distributed.nn.api import _script  # noqa: F401  (has the pickler take script modules)
from tensorplay.distributed.nn.api.remote_module import RemoteModule, interface
from tensorplay.distributed.nn.utils import (
    all_parameters,
    clip_grad_norm_,
    clip_grad_value_,
    get_grads,
    get_total_grad_norm,
)

__all__ = [
    "RemoteModule",
    "all_parameters",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_grads",
    "get_total_grad_norm",
    "interface",
]
