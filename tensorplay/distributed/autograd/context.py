"""Distributed autograd contexts: gradients that are kept apart from ``.grad``.

A context is made by one process. Calls made inside it carry its id, and with it it comes into
being on every process that they reach. It keeps what the calls sent, so that gradients find
their way back however the values travelled in between, and the gradients of the process.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from tensorplay.distributed.autograd import passes
from tensorplay.distributed.autograd.leaves import find_leaves, lent, unshared
from tensorplay.distributed.autograd.passes import Pass
from tensorplay.errors import GraphLostError, RpcTimeoutError, WorkerLostError
from tensorplay.protocol.messages import PeerInfo

if TYPE_CHECKING:
    from tensorplay.distributed.autograd.calls import Sent
    from tensorplay.distributed.rpc.agent import Agent

__all__ = ["Contexts", "DistAutogradContext", "named_errors"]

#: How many contexts that have ended are remembered, for messages that come late.
_REMEMBERED = 4096

#: Lower bits of an id, which tell the contexts of one process apart.
_ID_BITS = 48

#: Errors of a backward that keep their class.
_KEPT_ERRORS = (WorkerLostError, RpcTimeoutError, GraphLostError)


class DistAutogradContext:
    """What one process keeps of a distributed autograd context.

    Args:
        id: Its id, the same on every process.
        creator: Incarnation of the process that made it.
        me: Incarnation of this process.

    Attributes:
        sent: The calls made in it that may get gradients.
        running: How many backward passes of this process run for it.
    """

    def __init__(self, id: int, creator: int, me: int) -> None:
        self.id = id
        self.creator = creator
        self.sent: dict[int, Sent] = {}
        self.peers: dict[int, PeerInfo] = {}
        self.running = 0
        self._me = me
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._spent: list[Any] = []
        self._lock = threading.Lock()

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Sent]:
        return dict(self.sent)

    def _known_worker_ids(self) -> set[int]:
        """Returns the ids of the processes that calls of this context went to or came from."""
        return {peer.id for peer in list(self.peers.values())}

    def meet(self, peer: PeerInfo) -> None:
        """Notes a process that knows the context, too."""
        if peer.incarnation != self._me:
            self.peers[peer.incarnation] = peer

    @property
    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients so far of the leaves of this process."""
        with self._lock:
            return dict(self._gradients)

    def run(self, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> Pass:
        """Runs a backward pass of this process, whose graphs stay usable.

        Args:
            roots: Where it begins.
            gradients: Those of the roots.

        Returns:
            The pass, with the gradients of what other processes had sent.
        """
        run = Pass(accumulate=True, context=self)
        if not roots:
            return run
        leaves = find_leaves(roots)
        run.watch(roots)
        found: list[tuple[torch.Tensor, torch.Tensor]]
        with self._counted(), run:
            if leaves.watched:
                with lent(leaves.tensors, self.id) as found:
                    torch.autograd.backward(roots, gradients, retain_graph=True)
            else:
                wanted = [*leaves.tensors, *leaves.origins]
                results = torch.autograd.grad(
                    roots, wanted, gradients, retain_graph=True, allow_unused=True
                )
                found = [
                    (leaf, result)
                    for leaf, result in zip(leaves.tensors, results, strict=False)
                    if result is not None  # type: ignore[redundant-expr]
                ]
                own = unshared([gradient for _, gradient in found])
                found = [(leaf, gradient) for (leaf, _), gradient in zip(found, own, strict=True)]
        with self._lock:
            for leaf, gradient in found:
                before = self._gradients.get(leaf)
                total = gradient if before is None else passes.total(before, gradient)
                self._gradients[leaf] = total
        return run

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.running += 1
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1

    def use(self, roots: Sequence[GradientEdge], keep: bool) -> None:
        """Notes that a backward begins at these roots.

        The graphs themselves are kept until the context ends, as gradients may have to go
        through them more than once in one backward.

        Raises:
            RuntimeError: If one has begun there before that was not to retain the graph.
        """
        nodes = [root.node for root in roots if root.node.next_functions]
        if any(node is spent for node in nodes for spent in self._spent):
            raise RuntimeError(
                "Trying to backward through the graph a second time. Specify retain_graph=True "
                "if you need to backward through the graph a second time."
            )
        if not keep:
            self._spent += nodes


@contextmanager
def named_errors(id: int) -> Iterator[None]:
    """Says on which process a backward has failed: the one of that id."""
    try:
        yield
    except Exception as error:
        if str(error).startswith("Error on Node "):
            raise
        # What callers tell apart stays what it is; it is a RuntimeError as well.
        kind = type(error) if isinstance(error, _KEPT_ERRORS) else RuntimeError
        raise kind(f"Error on Node {id}: {error}") from error


class Contexts:
    """The distributed autograd contexts of one process.

    Args:
        agent: Sends and receives.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._contexts: dict[int, DistAutogradContext] = {}
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        self._numbers = itertools.count(secrets.randbits(_ID_BITS - 2))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def running(self) -> int:
        """How many backward passes of this process run for contexts."""
        return sum(context.running for context in list(self._contexts.values()))

    @property
    def first_id(self) -> int:
        """The smallest id that this process can give: it is in the 16 upper bits."""
        rank = self._agent.info.id
        return (rank if rank >= 0 else 0x4000 - rank) << _ID_BITS

    @property
    def last_id(self) -> int:
        """The largest id that this process can give."""
        return self.first_id + (1 << _ID_BITS) - 1

    def new(self) -> DistAutogradContext:
        """Makes a context."""
        me = self._agent.incarnation
        context = DistAutogradContext(self.first_id + next(self._numbers), me, me)
        self._contexts[context.id] = context
        return context

    def enter(self, id: int, creator: int) -> DistAutogradContext:
        """Returns the context that a message belongs to; makes it if it is new here."""
        with self._lock:
            context = self._contexts.get(id)
            if context is None:
                context = DistAutogradContext(id, creator, self._agent.incarnation)
                if id not in self._ended:  # else the message is late: a context for it alone
                    self._contexts[id] = context
            return context

    def get(self, id: int) -> DistAutogradContext:
        """Returns the context of an id.

        Raises:
            RuntimeError: If there is none here.
        """
        context = self._contexts.get(id)
        if context is None:
            raise RuntimeError(
                f"Could not find autograd context with id: {id}: it has ended, or no call made "
                "in it has reached this process"
            )
        return context

    def end(self, id: int) -> list[PeerInfo]:
        """Forgets a context; returns the other processes that are to do so."""
        with self._lock:
            context = self._contexts.pop(id, None)
            self._ended.append(id)
        return [] if context is None else list(context.peers.values())

    def peer_left(self, incarnation: int) -> None:
        """Forgets the contexts of a process that is gone."""
        for id, context in list(self._contexts.items()):
            if context.creator == incarnation:
                self.end(id)
