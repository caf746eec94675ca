"""Gradients through remote calls.

Nothing needs to be called: tensors that a remote call returns in grad mode have a ``grad_fn``,
and ``loss.backward()`` runs the backward on the workers, too. What is here beyond that is what
``torch.distributed.autograd`` offers: contexts, which keep gradients apart from ``.grad``.
"""

from __future__ import annotations

from tensorplay.distributed.autograd.context import DistAutogradContext
from tensorplay.distributed.autograd.dist import (
    _current_context as _current_context,
)
from tensorplay.distributed.autograd.dist import (
    _get_debug_info as _get_debug_info,
)
from tensorplay.distributed.autograd.dist import (
    _get_max_id as _get_max_id,
)
from tensorplay.distributed.autograd.dist import (
    _is_valid_context as _is_valid_context,
)
from tensorplay.distributed.autograd.dist import (
    _new_context as _new_context,
)
from tensorplay.distributed.autograd.dist import (
    _release_context as _release_context,
)
from tensorplay.distributed.autograd.dist import (
    _retrieve_context as _retrieve_context,
)
from tensorplay.distributed.autograd.dist import (
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
