"""Leases: how long a caller wants a graph to be kept on a worker.

A lease is tied to the memory of a tiny tensor, the *handle*, which the caller's node saves for
its backward as torch's own nodes save theirs. So it ends exactly when torch lets go of what the
node has saved: after a backward that does not retain the graph, with the outputs of the call,
or at once under activation checkpointing, which saves nothing and calls again.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tensorplay.protocol.messages import PeerInfo

if TYPE_CHECKING:
    from tensorplay.distributed.autograd.calls import Sent

__all__ = ["Lease", "live"]

_numbers = itertools.count(1)
_live: dict[int, Lease] = {}


class _Cell(ctypes.c_int64 * 1):  # type: ignore[misc]
    """The memory of a handle."""


class Lease:
    """The claim of this process on a graph that a worker keeps.

    Args:
        sent: The call whose graph it is.
        graph: Name of the graph at the callee.
        dropped: Is told that a graph is not wanted any more, in a finalizer: it must neither
            block nor take a lock.

    Attributes:
        spent: Whether the worker has let go of the graph by itself.
    """

    __slots__ = ("_dropped", "_number", "_watch", "graph", "sent", "spent")

    def __init__(self, sent: Sent, graph: int, dropped: Callable[[PeerInfo, int], None]) -> None:
        self.sent = sent
        self.graph = graph
        self.spent = False
        self._dropped = dropped
        self._number = next(_numbers)
        self._watch: weakref.ref[_Cell] | None = None

    def handle(self) -> torch.Tensor:
        """Returns the tensor, one int64, with whose memory the lease ends; call it once."""
        cell = _Cell(self._number)
        _live[self._number] = self
        self._watch = weakref.ref(cell, self._end)
        return torch.frombuffer(cell, dtype=torch.int64)

    @staticmethod
    def of(handle: torch.Tensor) -> Lease:
        """Returns the lease of a handle that is alive."""
        return _live[int(handle)]

    def _end(self, _: weakref.ref[_Cell]) -> None:
        self._watch = None
        _live.pop(self._number, None)
        if not self.spent:
            self._dropped(self.sent.peer, self.graph)


def live() -> int:
    """Returns how many leases this process has."""
    return len(_live)
