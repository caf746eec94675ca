# ruff: noqa: D102  (forward and backward of a node are described with its class)
"""The nodes that remote calls put into the graphs of caller and callee.

    caller   tensor -> StandIn -> RemoteCall -> output
    callee             ReceivedTensors -> tensor -> ... -> result

The engine runs a node on the thread of the device that its outputs are on. A remote backward
must not block the thread of an accelerator, which all backwards of the process share: the one
waited for may need it. So a call with outputs there has one more node, and only that one runs
on such a thread::

    caller   tensor -> StandIn -> RemoteCall -> ticket on the CPU -> Landing -> output
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tensorplay.distributed.autograd import passes
from tensorplay.distributed.autograd.leases import Lease

if TYPE_CHECKING:
    from tensorplay.distributed.autograd.calls import Received, Sent

__all__ = [
    "PARAMETERS",
    "ReceivedTensors",
    "edge_of",
    "received_tensors",
    "remote_call",
    "stand_in",
    "wants_parameters",
]

#: Stands for the parameters of all remote modules: a leaf, so that a call is trained even if
#: none of its inputs needs a gradient. It never gets one itself.
PARAMETERS = torch.zeros((), requires_grad=True)
_parameters_node: Any = get_gradient_edge(PARAMETERS).node


def wants_parameters() -> bool:
    """Returns whether the running backward wants gradients of parameters.

    It does not under ``torch.autograd.grad`` and ``backward(inputs=...)``, which name what
    they want.
    """
    try:
        return torch._C._will_engine_execute_node(_parameters_node)
    except RuntimeError:  # they are named: a context collects them with autograd.grad
        return True


#: The gradients of a call's outputs, by backward pass.
Landed = dict[int, tuple[torch.Tensor | None, ...]]


class StandIn(Function):
    """Takes a tensor's place in the graph: of the same shape, but of one element's memory.

    So neither does the graph keep the tensor's memory, nor does it matter what is written into
    the tensor after the call.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        if tensor.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(  # type: ignore[call-arg]
                size=tensor.shape,
                dtype=tensor.dtype,
                device=tensor.device,
                check_invariants=False,
            )
        single = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        return single.expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient


class RemoteCall(Function):
    """The node of a call at the caller: its backward is the remote backward.

    Its outputs are the tensors of the result, or a ticket for each if it is given a ``Landed``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sent: Sent,
        handle: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        landed: Landed | None,
        parameters: torch.Tensor,
        *stand_ins: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sent = sent
        ctx.landed = landed
        ctx.save_for_backward(handle)
        return _fresh(outputs) if landed is None else tuple(torch.zeros(()) for _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (handle,) = ctx.saved_tensors  # where a second backward fails, as torch's own nodes do
        if ctx.landed is not None:
            gradients = ctx.landed.pop(torch._C._current_graph_task_id())
        return None, None, None, None, None, *ctx.sent.backward(Lease.of(handle), gradients)


class Landing(Function):
    """Exchanges the tickets of a call for its outputs, and their gradients for tickets."""

    @staticmethod
    def forward(
        ctx: Any, landed: Landed, outputs: Sequence[torch.Tensor], *tickets: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.landed = landed
        return _fresh(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.landed[torch._C._current_graph_task_id()] = gradients
        tickets = (None if gradient is None else torch.zeros(()) for gradient in gradients)
        return None, None, *tickets


class ReceivedTensors(Function):
    """The node of the tensors of a request at the callee: catches their gradients."""

    @staticmethod
    def forward(
        ctx: Any, received: Received, tensors: Sequence[torch.Tensor], origin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.received = received
        return _fresh(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        received: Received = ctx.received
        caught = gradients[: received.count]
        if any(gradient is not None for gradient in caught):
            run = passes.running()
            if run is not None:
                run.capture(received.key, caught)
            else:  # a backward that this process began by itself
                received.engine.deliver(received.key, caught)
        return None, None, None


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what takes a tensor's place in the graph of the caller."""
    result: torch.Tensor = StandIn.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def remote_call(
    sent: Sent, handle: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a result as outputs of the call's node.

    Args:
        sent: The call.
        handle: That of the lease on the callee's graph.
        tensors: The tracked tensors of the result.
    """
    outputs: tuple[torch.Tensor, ...]
    landed: Landed | None = None if all(map(_is_on_host, tensors)) else {}
    outputs = RemoteCall.apply(sent, handle, tensors, landed, PARAMETERS, *sent.inputs)  # type: ignore[no-untyped-call]
    node = outputs[0].grad_fn
    node._set_sequence_nr(sent.sequence)  # type: ignore[union-attr]
    if landed is not None:
        outputs = Landing.apply(landed, tensors, *outputs)  # type: ignore[no-untyped-call]
    return outputs


def received_tensors(
    received: Received, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a request as outputs of a node that catches their gradients."""
    outputs: tuple[torch.Tensor, ...]
    outputs = ReceivedTensors.apply(received, tensors, received.origin)  # type: ignore[no-untyped-call]
    return outputs


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Returns where a tensor's gradient goes, as it is now: later writes do not matter.

    ``torch.autograd.graph.get_gradient_edge``, for tensors of any layout.
    """
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():  # such tensors have no views
        after = tensor.clone().grad_fn
    assert after is not None
    node, output = after.next_functions[0]
    assert node is not None
    return GradientEdge(node, output, after)  # which keeps the graph alive


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


def _fresh(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns tensors with the same memory, to be the outputs of a node.

    They can be written to in place, unless they share memory with each other: torch could not
    know that the gradient of one is then another's, too, so it is made to refuse.
    """
    outputs = [tensor.detach() for tensor in tensors]
    if len(outputs) > 1:
        places = [_place(tensor) for tensor in outputs]
        outputs = [
            tensor if place is None or places.count(place) == 1 else tensor.view_as(tensor)
            for tensor, place in zip(outputs, places, strict=True)
        ]
    return tuple(outputs)


def _place(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()
