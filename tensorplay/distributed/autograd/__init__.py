"""Gradients through remote calls.

Nothing needs to be called: tensors that a remote call returns in grad mode have a ``grad_fn``,
and ``loss.backward()`` runs the backward on the workers, too. What is here beyond that is what
``torch.distributed.autograd`` offers: contexts, which keep gradients apart from ``.grad``.
"""

from __future__ import annotations

from tensorplay.distributed.autograd.context import DistAutogradContext
from tensorplay.distributed.autograd.dist import (
    _current_context,
    _get_debug_info,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    context,
    get_gradients,
)
from tensorplay.distributed.autograd.engine import engine
from tensorplay.distributed.autograd.install import install

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "get_gradients",
    "is_available",
    "live_graphs",
]

install()


def is_available() -> bool:
    """Returns whether distributed autograd can be used: always."""
    return True


def live_graphs() -> int:
    """Returns how many graphs this process keeps for the backward of other processes.

    Raises:
        NotInitializedError: If this process has no agent.
    """
    return engine().live_graphs
