"""Distributed autograd as ``torch.distributed.autograd`` has it: contexts and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from tensorplay.distributed.autograd import passes
from tensorplay.distributed.autograd.context import DistAutogradContext, named_errors
from tensorplay.distributed.autograd.engine import engine
from tensorplay.distributed.autograd.nodes import edge_of
from tensorplay.distributed.autograd.passes import Gradients, Key
from tensorplay.distributed.autograd.threads import thread
from tensorplay.distributed.rpc.allow import wire_safe
from tensorplay.errors import NotInitializedError

__all__ = ["backward", "context", "get_gradients"]


class context:  # noqa: N801  # torch's name
    """Collects the gradients of calls and of ``backward`` apart from ``.grad``.

    As a context manager it gives the id that the other functions take. When it ends, it ends on
    every process that its calls have reached.

    Example::

        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker0", model_loss, args=(batch,))
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Raises:
        RuntimeError: If the thread is in a context already.
        NotInitializedError: If this process has no agent.
    """

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context.id

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _release_context(self.autograd_context.id)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Runs the backward pass of a context on every process that took part in the forward.

    Args:
        context_id: Which context collects the gradients.
        roots: Where it begins: tensors of one element with a ``grad_fn``.
        retain_graph: Whether another backward may begin at the same roots.

    Raises:
        RuntimeError: If there is no such context, a root is none, the graph was used up, or
            the backward fails on a process (``Error on Node <id>: ...``).
    """
    given: tuple[object, object] = (context_id, roots)
    if not (isinstance(given[0], int) and isinstance(given[1], (list, tuple))):
        raise TypeError(
            "backward(): incompatible function arguments. Expected (context_id: int, "
            f"roots: list[Tensor], retain_graph: bool = False), got ({context_id!r}, {roots!r}, "
            f"{retain_graph!r})"
        )
    here = engine()
    found = here.contexts.get(context_id)
    _check(roots)
    edges = [edge_of(root) for root in roots]
    found.use(edges, retain_graph)
    with named_errors(here.agent.info.id):
        run = found.run(edges, [torch.ones_like(root) for root in roots])
        # Gradients are linear: what has come for tensors that some process sent goes on from
        # there in a pass of its own, until nothing more has come.
        pending: dict[Key, list[torch.Tensor | None]] = run.gradients
        while pending:
            key = next(iter(pending))
            for reached, gradients in _take_from(found, key, pending.pop(key)):
                pending[reached] = passes.add(pending.get(reached), gradients)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Returns the gradients that a context has collected for leaves of this process.

    Raises:
        RuntimeError: If there is no such context here.
    """
    return engine().contexts.get(context_id).gradients


def _check(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root: no backward can begin there")
        if root.numel() != 1:
            raise RuntimeError(
                f"root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar"
            )
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function: it is a leaf")


def _take_from(
    found: DistAutogradContext, key: Key, gradients: Gradients
) -> list[tuple[Key, Gradients]]:
    """Has the sender of tensors go on from there with their gradients."""
    here = engine()
    caller, number = key
    if caller == here.agent.incarnation:
        return _take(found, number, gradients)
    peer = here.agent.peer_by_incarnation(caller)
    if peer is None:
        raise RuntimeError("the backward reached tensors that were sent by a process that is gone")
    found.meet(peer)
    arguments = (found.id, found.creator, number, list(gradients))
    result: list[tuple[Key, Gradients]]
    result = here.agent.call(peer, _take_there, arguments, hooks=False).wait()
    return result


@wire_safe(gradients=True)
def _take_there(
    context_id: int, creator: int, number: int, gradients: Gradients
) -> list[tuple[Key, Gradients]]:
    here = engine()
    with named_errors(here.agent.info.id):
        return _take(here.contexts.enter(context_id, creator), number, gradients)


def _take(
    found: DistAutogradContext, number: int, gradients: Gradients
) -> list[tuple[Key, Gradients]]:
    sent = found.sent.get(number)
    if sent is None:  # sent by a call outside of the context: no part of it, as in torch
        return []
    pairs = [
        (edge_of(stand_in), gradient)
        for stand_in, gradient in zip(sent.stand_ins, gradients, strict=True)
        if gradient is not None
    ]
    run = found.run([start for start, _ in pairs], [gradient for _, gradient in pairs])
    return list(run.gradients.items())


# Names that tests and tools written for torch use.


def _new_context() -> DistAutogradContext:
    if thread.context is not None:
        raise RuntimeError(
            f"Already have an autograd context id for this thread: {thread.context.id}; "
            "contexts cannot be nested"
        )
    thread.context = engine().contexts.new()
    return thread.context


@wire_safe(gradients=True)
def _release_context(context_id: int, told_by: int = 0) -> None:
    if thread.context is not None and thread.context.id == context_id:
        thread.context = None
    try:
        here = engine()
    except NotInitializedError:  # shut down inside the context
        return
    for known in here.contexts.end(context_id):
        peer = here.agent.peer_by_incarnation(known.incarnation)
        if peer is not None and peer.incarnation != told_by:
            arguments = (context_id, here.agent.incarnation)
            future = here.agent.call(peer, _release_context, arguments, hooks=False)
            future._retrieved = True  # if it fails, one of both is gone, and the context with it


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return engine().contexts.get(context_id)


def _current_context() -> DistAutogradContext:
    if thread.context is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context: wrap the code in "
            "`with dist_autograd.context() as context_id:`"
        )
    return thread.context


def _is_valid_context(context_id: int) -> bool:
    try:
        return bool(_retrieve_context(context_id))
    except RuntimeError:
        return False


def _get_debug_info() -> dict[str, str]:
    contexts = engine().contexts
    return {
        "num_current_backward_passes": str(contexts.running),
        "num_autograd_contexts": str(len(contexts)),
    }


def _get_max_id() -> int:
    return engine().contexts.last_id
