"""Modules that live on a worker."""

from __future__ import annotations

from tensorplay.distributed.nn.api.remote_module import RemoteModule, interface

__all__ = ["RemoteModule", "interface"]
