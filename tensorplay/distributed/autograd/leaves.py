"""The leaves of a graph, and how a distributed autograd context gets their gradients.

A context's gradients must not show in ``.grad``. Where nobody watches the leaves, the engine is
asked for their gradients, and nothing else changes. Where hooks hang on what accumulates
gradients - DistributedDataParallel's reducer does, in C++, where it cannot be seen - they must
find ``.grad`` as usual: it is lent to the context for the duration of the pass.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from tensorplay.distributed.autograd.nodes import PARAMETERS, ReceivedTensors
from tensorplay.distributed.rpc.executor import blocked

__all__ = ["Leaves", "find_leaves", "lent", "unshared"]

_received_node: Any = ReceivedTensors._backward_cls


class Leaves(NamedTuple):
    """What a graph leads to.

    Attributes:
        tensors: The leaves that get gradients.
        origins: The leaves that only stand for something: parameters elsewhere, requests.
        watched: Whether hooks may hang on the accumulation of the tensors' gradients.
    """

    tensors: list[torch.Tensor]
    origins: list[torch.Tensor]
    watched: bool


def find_leaves(roots: Sequence[GradientEdge]) -> Leaves:
    """Returns the leaves behind the roots."""
    tensors: list[torch.Tensor] = []
    origins: list[torch.Tensor] = []
    watched = torch.distributed.is_available() and torch.distributed.is_initialized()
    stack: list[Any] = [root.node for root in roots]
    seen = set(stack)
    stack = list(seen)
    while stack:
        node = stack.pop()
        if isinstance(node, _received_node):
            origins.append(node.received.origin)
            continue
        leaf = getattr(node, "variable", None)
        if leaf is PARAMETERS:
            origins.append(leaf)
        elif leaf is not None:
            tensors.append(leaf)
            watched = watched or bool(leaf._post_accumulate_grad_hooks) or _has_hooks(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return Leaves(tensors, origins, watched)


def _has_hooks(node: Any) -> bool:
    """Whether hooks written in Python hang on a node: a new one joins them in one dict."""
    handle = node.register_hook(lambda *_: None)
    try:
        return len(handle.hooks_dict_ref()) > 1
    finally:
        handle.remove()


def unshared(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns gradients that can be written into one by one, as those in ``.grad`` can.

    The engine may give several leaves the same tensor, or one that is expanded.
    """
    places = Counter(map(_place, gradients))
    return [
        gradient.clone() if places[_place(gradient)] > 1 or _is_expanded(gradient) else gradient
        for gradient in gradients
    ]


def _place(gradient: torch.Tensor) -> int:
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    if gradient.layout is not torch.strided:
        return id(gradient)
    return gradient.untyped_storage().data_ptr() or id(gradient)  # empty ones are nowhere


def _is_expanded(gradient: torch.Tensor) -> bool:
    if gradient.layout is torch.sparse_coo:
        return _is_expanded(gradient._values()) or _is_expanded(gradient._indices())
    return gradient.layout is torch.strided and 0 in gradient.stride()


class _Loan:
    """A leaf's ``.grad`` while it is lent."""

    __slots__ = ("borrower", "count", "own")

    def __init__(self, borrower: int, own: torch.Tensor | None) -> None:
        self.borrower = borrower
        self.own = own
        self.count = 0


_loans: dict[int, _Loan] = {}
_returned = threading.Condition()


@contextmanager
def lent(
    tensors: Sequence[torch.Tensor], borrower: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Lends the ``.grad`` of leaves to a context for a pass.

    Passes of the same context may share a loan; those of others wait.

    Args:
        tensors: The leaves.
        borrower: Id of the context.

    Yields:
        A list that has the gradients, with their leaves, when the context manager ends.
    """
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
    with _returned:
        if not _are_free(tensors, borrower):
            with blocked():
                _returned.wait_for(lambda: _are_free(tensors, borrower))
        for tensor in tensors:
            loan = _loans.get(id(tensor))
            if loan is None:
                loan = _loans[id(tensor)] = _Loan(borrower, tensor.grad)
                tensor.grad = None
            loan.count += 1
    try:
        yield gradients
    finally:
        with _returned:
            for tensor in tensors:
                loan = _loans[id(tensor)]
                loan.count -= 1
                if loan.count:
                    continue
                del _loans[id(tensor)]
                if tensor.grad is not None:
                    gradients.append((tensor, tensor.grad))
                tensor.grad = loan.own
            _returned.notify_all()


def _are_free(tensors: Sequence[torch.Tensor], borrower: int) -> bool:
    return all(
        loan.borrower == borrower
        for tensor in tensors
        if (loan := _loans.get(id(tensor))) is not None
    )
