"""What calls tell autograd, and what autograd makes of it.

``rpc`` knows nothing of gradients: it shows the tensors of each request and reply to the
installed ``CallHooks``, which may replace them, and carries a few bytes (``meta``) for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tensorplay.protocol.messages import PeerInfo

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.rref import RRef


class Execution(Protocol):
    """One request on the callee, as autograd sees it.

    Attributes:
        tensors: What the function gets in place of the request's tensors.
    """

    tensors: list[torch.Tensor]

    def activate(self) -> AbstractContextManager[None]:
        """Returns the context in which the function runs: grad mode, autocast, context id."""

    def reply(self, tensors: list[torch.Tensor], copies: frozenset[int]) -> bytes:
        """Takes the tensors of the result and returns the meta of the reply.

        Args:
            tensors: The tensors.
            copies: Positions of those that travel as copies, without their past.
        """

    def failed(self) -> None:
        """The function has raised, or its result cannot be sent."""


class CallHooks(Protocol):
    """Autograd's part in calls. An empty meta means that there is nothing to do."""

    def request(
        self,
        tensors: list[torch.Tensor],
        peer: PeerInfo,
        rrefs: Sequence[RRef[Any]],
        copies: frozenset[int],
    ) -> tuple[bytes, Any]:
        """Caller: takes the tensors and references of a request.

        Args:
            tensors: The tensors.
            peer: The callee.
            rrefs: The references.
            copies: Positions of the tensors that travel as copies, without their past.

        Returns:
            The meta of the request, and what ``result`` wants back.
        """

    def execute(self, meta: bytes, src: PeerInfo, tensors: list[torch.Tensor]) -> Execution:
        """Callee: takes the tensors of a request with a meta."""

    def result(self, state: Any, meta: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Caller: takes the tensors of a reply with a meta, returns those to use instead."""

    def discard(self, src: PeerInfo, meta: bytes) -> None:
        """Caller: a reply with a meta has come that nobody waits for; must not block."""

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a backward pass that collects its gradients in a context."""

    def flush(self) -> None:
        """Both: has what is due sent; called now and then and after ``Agent.wake``."""

    def stats(self) -> dict[str, float]:
        """Returns counts of what is kept for others."""


_installed: CallHooks | None = None


def install(hooks: CallHooks) -> None:
    """Makes ``hooks`` take part in every call from now on."""
    global _installed
    _installed = hooks


def current() -> CallHooks:
    """Returns the installed hooks."""
    assert _installed is not None, "tensorplay.distributed installs the hooks"
    return _installed
