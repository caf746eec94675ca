"""A call as its caller and its callee remember it for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from tensorplay.distributed.autograd.leases import Lease
from tensorplay.distributed.autograd.modes import Modes
from tensorplay.distributed.autograd.passes import Key
from tensorplay.distributed.autograd.threads import thread
from tensorplay.distributed.autograd.wire import Meta
from tensorplay.protocol.messages import PeerInfo

if TYPE_CHECKING:
    from tensorplay.distributed.autograd.context import DistAutogradContext
    from tensorplay.distributed.autograd.engine import Engine

__all__ = ["Execution", "Graph", "Received", "Sent"]

#: ``pack`` and ``unpack`` of ``torch.autograd.graph.saved_tensors_hooks``.
SavedTensorsHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


#: Calls, each after a number.
Extras = tuple[tuple[int, "Sent"], ...]


class Sent:
    """A call that this process makes in grad mode.

    Attributes:
        engine: Autograd of this process.
        peer: The callee.
        number: Names the call if tensors may get gradients through it, else 0.
        stand_ins: Stand for the tracked tensors of the request.
        extras: Earlier calls whose tensors may get gradients through this one, each with the
            number under which the callee knows it.
        gate: Ties the call to the request that this process executed when it made it.
        hooks: The saved-tensors hooks under which the call was made.
        sequence: Where the call stands among the nodes that the calling thread has made: the
            engine prefers later ones, whichever thread makes the node of this call.
    """

    __slots__ = (
        "__weakref__",
        "engine",
        "extras",
        "gate",
        "hooks",
        "number",
        "peer",
        "sequence",
        "stand_ins",
    )

    def __init__(
        self,
        engine: Engine,
        peer: PeerInfo,
        number: int = 0,
        stand_ins: Sequence[torch.Tensor] = (),
        extras: Extras = (),
        gate: torch.Tensor | None = None,
    ) -> None:
        self.engine = engine
        self.peer = peer
        self.number = number
        self.stand_ins = stand_ins
        self.extras = extras
        self.gate = gate
        self.hooks: SavedTensorsHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(
            False
        )

        self.sequence: int = torch._C._autograd._get_sequence_nr()

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What the call's node gets as inputs, in the order of ``backward``'s gradients."""
        inputs = [*self.stand_ins, *(one for _, sent in self.extras for one in sent.stand_ins)]
        return inputs if self.gate is None else [*inputs, self.gate]

    def backward(
        self, lease: Lease, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Runs the backward at the callee and returns the gradients of ``inputs``."""
        return self.engine.backward(self, lease, gradients)


class Received:
    """The tensors of a request that may get gradients, at the callee.

    Attributes:
        engine: Autograd of this process.
        key: Names the call.
        count: How many tensors the caller tracks.
        origin: A leaf behind the tensors: autograd.grad reaches them when asked for it.
        gate: A tensor that later calls can be tied to, or None.
    """

    __slots__ = ("__weakref__", "count", "engine", "gate", "key", "origin")

    def __init__(self, engine: Engine, key: Key, count: int) -> None:
        self.engine = engine
        self.key = key
        self.count = count
        self.origin = torch.empty((), requires_grad=True)


class Graph:
    """What a callee keeps of a call whose result has a gradient.

    Attributes:
        caller: Incarnation of the process that holds the lease.
        outputs: The tracked tensors of the result, in the graph.
        received: The tensors of the request, if any may get gradients.
        shared: Whether others may go through the same nodes: the result was there before.
    """

    __slots__ = ("caller", "outputs", "received", "shared")

    def __init__(
        self,
        caller: int,
        outputs: list[GradientEdge],
        received: Received | None,
        shared: bool,
    ) -> None:
        self.caller = caller
        self.outputs = outputs
        self.received = received
        self.shared = shared


class Execution:
    """A request that this process executes: implements ``hooks.Execution``.

    It is its own ``activate()``, the context manager in which the function runs.

    Args:
        engine: Autograd of this process.
        src: The caller.
        meta: What it tells of itself.
        tensors: Tensors of the request; those that it tracks are replaced.
        context: The distributed autograd context that the call belongs to.
    """

    __slots__ = (
        "_before",
        "_context",
        "_engine",
        "_graph",
        "_meta",
        "_modes",
        "_ran",
        "_received",
        "_src",
        "gate",
        "tensors",
    )

    def __init__(
        self,
        engine: Engine,
        src: PeerInfo,
        meta: Meta,
        tensors: list[torch.Tensor],
        received: Received | None,
        gate: torch.Tensor | None,
        context: DistAutogradContext | None,
    ) -> None:
        self._engine = engine
        self._src = src
        self._meta = meta
        self.tensors = tensors
        self._received = received
        self.gate = gate
        self._context = context
        self._modes = Modes(meta.grad, meta.inference, meta.autocast)
        self._before: tuple[DistAutogradContext | None, Execution | None] = (None, None)
        self._graph = 0
        self._ran = False

    def activate(self) -> Execution:
        """Returns the context manager in which the function runs."""
        return self

    def __enter__(self) -> None:
        self._ran = True
        self._before = (thread.context, thread.execution)
        thread.context, thread.execution = self._context, self
        self._modes.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._modes.__exit__(kind, error, traceback)
        thread.context, thread.execution = self._before
        self.tensors = []

    def reply(self, tensors: list[torch.Tensor], copies: frozenset[int] = frozenset()) -> bytes:
        """Keeps the graph of the result and returns the meta of the reply.

        Args:
            tensors: The tensors of the result.
            copies: Positions of those that travel as copies without a past.
        """
        meta, self._graph = self._engine.record(
            self._src, self._meta, self._received, tensors, copies, shared=not self._ran
        )
        self._received = None
        return meta

    def failed(self) -> None:
        """Lets go of what was kept: the result cannot be sent."""
        self._engine.drop([self._graph])
        self._received = None
        self.tensors = []
