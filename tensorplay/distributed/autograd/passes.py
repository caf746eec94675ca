"""Backward passes that a process runs for somebody else, and the gradients they collect."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from tensorplay.distributed.autograd.threads import thread

if TYPE_CHECKING:
    from tensorplay.distributed.autograd.context import DistAutogradContext

__all__ = ["Gradients", "Key", "Pass", "add", "running", "total"]

#: Names a call: incarnation of the caller, and the number that it gave the call.
Key = tuple[int, int]

#: Gradients of the tracked tensors of a call; None for those that got none.
Gradients = Sequence[torch.Tensor | None]

_by_task: dict[int, Pass] = {}


class Pass:
    """A context manager around a backward pass in this thread.

    The nodes that stand for received tensors hand their gradients to it, on whichever thread
    the engine runs them.

    Args:
        accumulate: Whether the parameters of remote calls in the graph are to get gradients.
        context: The distributed autograd context that gets the gradients, if one does.

    Attributes:
        gradients: What the tracked tensors of calls have got, by call.
    """

    def __init__(self, accumulate: bool, context: DistAutogradContext | None = None) -> None:
        self.accumulate = accumulate
        self.context = context
        self.gradients: dict[Key, list[torch.Tensor | None]] = {}
        self._lock = threading.Lock()
        self._outer: Pass | None = None
        self._tasks: list[int] = []
        self._hooks: list[RemovableHandle] = []

    def watch(self, roots: Sequence[GradientEdge]) -> None:
        """Has the pass found on the engine's device threads, too; before it starts."""
        if not _has_device_threads():
            return

        def note(*_: object) -> None:
            task = torch._C._current_graph_task_id()
            self._tasks.append(task)
            _by_task[task] = self

        self._hooks += [root.node.register_prehook(note) for root in roots]

    def capture(self, key: Key, gradients: Gradients) -> None:
        """Adds the gradients of a call's tensors; from any thread."""
        with self._lock:
            self.gradients[key] = add(self.gradients.get(key), gradients)

    def take(self, key: Key) -> list[torch.Tensor | None] | None:
        """Removes and returns the gradients of a call's tensors."""
        return self.gradients.pop(key, None)

    def __enter__(self) -> Pass:
        self._outer, thread.running = thread.running, self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        thread.running = self._outer
        for hook in self._hooks:
            hook.remove()
        for task in self._tasks:
            _by_task.pop(task, None)


def running() -> Pass | None:
    """Returns the pass that the calling node is part of, or None."""
    if thread.running is not None or not _by_task:
        return thread.running
    return _by_task.get(torch._C._current_graph_task_id())


def add(some: Gradients | None, others: Gradients) -> list[torch.Tensor | None]:
    """Returns the sums of gradients, of which any may be missing."""
    if some is None:
        return list(others)
    return [
        b if a is None else a if b is None else total(a, b)
        for a, b in zip(some, others, strict=True)
    ]


def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the sum of two gradients."""
    # A sparse tensor cannot have a dense one added, but the reverse is possible.
    return b + a if a.is_sparse and not b.is_sparse else a + b


@functools.cache
def _has_device_threads() -> bool:
    """Whether the engine runs nodes on threads of its own: it does for accelerators."""
    return torch.accelerator.is_available()
