"""What autograd knows of the running thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorplay.distributed.autograd.calls import Execution, Extras
    from tensorplay.distributed.autograd.context import DistAutogradContext
    from tensorplay.distributed.autograd.passes import Pass

__all__ = ["thread"]


class _Thread(threading.local):
    """State of one thread.

    Attributes:
        context: The distributed autograd context that calls are recorded in.
        execution: The request that this thread executes.
        running: The backward pass that it runs for a caller or for a context.
        extras: Earlier calls whose tensors may get gradients through the next call: see
            ``Sent.extras``.
    """

    context: DistAutogradContext | None = None
    execution: Execution | None = None
    running: Pass | None = None
    extras: Extras = ()


thread = _Thread()
