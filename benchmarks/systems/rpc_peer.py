"""The part of a peer that is the same for tensorplay and torch.distributed.rpc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.systems.base import PeerSpec, Pending, peer_name


class RpcPeer:
    """A peer whose system has the functions of ``torch.distributed.rpc``.

    Args:
        spec: What the process was told.
        rpc: The module with ``rpc_sync``, ``rpc_async`` and ``shutdown``.
        module_class: Its ``RemoteModule``.
    """

    def __init__(self, spec: PeerSpec, rpc: Any, module_class: Any) -> None:
        self.workers: Sequence[str] = [
            peer_name(spec.shape, index) for index in range(spec.shape.workers)
        ]
        self._rpc = rpc
        self._module_class = module_class

    def call(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function on a worker and returns its result."""
        return self._rpc.rpc_sync(worker, function, args)

    def submit(self, worker: str, function: Callable[..., Any], *args: Any) -> Pending:
        """Starts to run a function on a worker."""
        pending: Pending = self._rpc.rpc_async(worker, function, args)
        return pending

    def layer(self, worker: str, width: int) -> Callable[[Tensor], Tensor]:
        """Makes a ``Linear(width, width)`` on a worker and returns what calls it."""
        module: Callable[[Tensor], Tensor] = self.remote(worker, width)
        return module

    def remote(self, worker: str, width: int) -> Any:
        """Makes a ``Linear(width, width)`` on a worker and returns its ``RemoteModule``."""
        return self._module_class(f"{worker}/cpu", torch.nn.Linear, (width, width))

    def close(self) -> None:
        """Leaves the group, whoever else is left."""
        self._rpc.shutdown(graceful=False)
