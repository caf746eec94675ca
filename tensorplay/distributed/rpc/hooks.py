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

    def reply(self, tensors: list[torch.Tensor]) -> bytes:
        """Takes the tensors of the result and returns the meta of the reply."""

    def failed(self) -> None:
        """The function has raised, or its result cannot be sent."""


class CallHooks(Protocol):
    """Autograd's part in calls. An empty meta means that there is nothing to do."""

    def request(
        self, tensors: list[torch.Tensor], peer: PeerInfo, rrefs: Sequence[RRef[Any]]
    ) -> tuple[bytes, Any]:
        """Caller: takes the tensors and references of a request.

        Returns:
            The meta of the request, and what ``result`` wants back.
        """

    def execute(
        self, meta: bytes, src: PeerInfo, request_id: int, tensors: list[torch.Tensor]
    ) -> Execution:
        """Callee: takes the tensors of a request with a meta."""

    def result(self, state: Any, meta: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Caller: takes the tensors of a reply with a meta, returns those to use instead."""

    def failed(self, state: Any) -> None:
        """Caller: the call has raised."""


_installed: CallHooks | None = None


def install(hooks: CallHooks) -> None:
    """Makes ``hooks`` take part in every call from now on."""
    global _installed
    _installed = hooks


def current() -> CallHooks:
    """Returns the installed hooks."""
    assert _installed is not None, "tensorplay.distributed installs the hooks"
    return _installed
