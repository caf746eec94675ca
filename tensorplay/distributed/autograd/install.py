"""Joins remote autograd to remote calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tensorplay.distributed.autograd.calls import Execution
from tensorplay.distributed.autograd.dist import backward
from tensorplay.distributed.autograd.engine import engine, existing_engine
from tensorplay.distributed.rpc import hooks
from tensorplay.protocol.messages import PeerInfo

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.rref import RRef

__all__ = ["install"]


class AutogradHooks:
    """Implements ``hooks.CallHooks``: each call is the business of the agent's engine."""

    def request(
        self,
        tensors: list[torch.Tensor],
        peer: PeerInfo,
        rrefs: Sequence[RRef[Any]],
        copies: frozenset[int],
    ) -> tuple[bytes, Any]:
        """Records a request."""
        return engine().request(tensors, peer, rrefs, copies)

    def execute(self, meta: bytes, src: PeerInfo, tensors: list[torch.Tensor]) -> Execution:
        """Takes a request."""
        return engine().execute(meta, src, tensors)

    def result(self, state: Any, meta: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Takes a reply."""
        return engine().result(state, meta, tensors)

    def discard(self, src: PeerInfo, meta: bytes) -> None:
        """Throws a reply away."""
        if (here := existing_engine()) is not None:
            here.discard(src, meta)

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass in a context."""
        backward(context_id, roots, retain_graph)

    def flush(self) -> None:
        """Sends what is due."""
        if (here := existing_engine()) is not None:
            here.flush()

    def stats(self) -> dict[str, float]:
        """Counts."""
        here = existing_engine()
        return {} if here is None else here.stats()


def install() -> None:
    """Has every call from now on take part in autograd."""
    hooks.install(AutogradHooks())
