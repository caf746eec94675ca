"""Modules that live on a worker."""

from __future__ import annotations

from tensorplay.distributed.nn.api import _script  # noqa: F401  (has the pickler take script modules)
from tensorplay.distributed.nn.api.remote_module import RemoteModule, interface

__all__ = ["RemoteModule", "interface"]
