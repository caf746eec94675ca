"""Remote autograd of one process: what it keeps as caller and as callee, and its backward.

A call in grad mode whose result depends on anything that requires a gradient - a tensor of the
request, a parameter of the callee - gives tensors with a ``grad_fn``, as a local module does.
The callee keeps the graph of the result; the node at the caller holds a lease on it and, in its
backward, has the callee run the backward of that graph and return the gradients of the tensors
that were sent. The forward is never computed again.

Two kinds of backward, as in torch: one that accumulates into the ``.grad`` of every leaf, on
every process, and one that gives the gradients that were asked for and touches nothing else
(``torch.autograd.grad``, ``backward(inputs=...)``).

A graph at a callee may lead to tensors of other calls: the value was kept there in between, as
behind an RRef, or in a module. Their gradients come back with the answer, named by call. The
caller passes them on to its node's inputs where these stand for such a call (``Sent.extras``);
if it is itself running a backward for another process, it answers with them; else it has the
process that sent the tensors take them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tensorplay.distributed.autograd import passes, wire
from tensorplay.distributed.autograd.calls import Execution, Graph, Received, Sent
from tensorplay.distributed.autograd.context import Contexts, DistAutogradContext, named_errors
from tensorplay.distributed.autograd.leases import Lease
from tensorplay.distributed.autograd.modes import enabled_autocast
from tensorplay.distributed.autograd.nodes import (
    edge_of,
    received_tensors,
    remote_call,
    stand_in,
    wants_parameters,
)
from tensorplay.distributed.autograd.passes import Gradients, Key, Pass
from tensorplay.distributed.autograd.threads import thread
from tensorplay.distributed.rpc import current
from tensorplay.distributed.rpc.agent import Agent
from tensorplay.distributed.rpc.allow import wire_safe
from tensorplay.errors import GraphLostError, OwnerLostError, ProtocolError
from tensorplay.protocol.messages import Departure, PeerInfo

__all__ = ["Engine", "engine", "existing_engine"]

#: Gradients of the request's tensors, then those of other calls' tensors.
Answer = tuple[Gradients, list[tuple[Key, Gradients]]]

#: State of a call made without grad mode, and of one made in inference mode.
_NO_GRAD, _INFERENCE = object(), object()


class Engine:
    """Remote autograd of one agent.

    Args:
        agent: Sends and receives.

    Attributes:
        contexts: The distributed autograd contexts of this process.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.contexts = Contexts(agent)
        self._graphs: dict[int, Graph] = {}
        self._graph_numbers = itertools.count(1)
        self._call_numbers = itertools.count(1)
        self._sent: weakref.WeakValueDictionary[int, Sent] = weakref.WeakValueDictionary()
        self._received: weakref.WeakValueDictionary[Key, Received] = weakref.WeakValueDictionary()
        self._dropped: deque[tuple[PeerInfo, int]] = deque()
        agent.on_peer_left(self._peer_left)

    # The caller's side.

    def request(
        self,
        tensors: Sequence[torch.Tensor],
        peer: PeerInfo,
        rrefs: Sequence[Any],
        copies: frozenset[int],
    ) -> tuple[bytes, Any]:
        """Records a call that is about to be sent; see ``hooks.CallHooks.request``."""
        grad = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled()
        autocast = enabled_autocast()
        context = thread.context
        if grad and not (tensors or rrefs or context or inference or autocast or thread.extras):
            return wire.GRAD_MODE, Sent(self, peer)
        sent: Sent | None = None
        tracked: list[int] = []
        if grad:
            tracked = _tracked(tensors, copies)
            sent = self._record_sent(peer, [tensors[i] for i in tracked], rrefs)
            if context is not None and sent.number:
                context.sent[sent.number] = sent
        if context is not None:
            context.meet(peer)
        elif not (inference or autocast or (sent is not None and sent.number)):
            return (wire.GRAD_MODE, sent) if grad else (wire.NO_GRAD_MODE, _NO_GRAD)
        meta = wire.Meta(
            grad,
            inference,
            autocast,
            0 if sent is None else sent.number,
            tracked,
            sent is not None and bool(sent.extras or sent.gate is not None),
            0 if context is None else context.id,
            0 if context is None else context.creator,
        )
        return wire.encode(meta), sent or (_INFERENCE if inference else _NO_GRAD)

    def _record_sent(
        self, peer: PeerInfo, tracked: list[torch.Tensor], rrefs: Iterable[Any]
    ) -> Sent:
        extras, gate = thread.extras, None
        for rref in rrefs:
            for edge in rref.autograd_edges:
                candidates = ((edge.number, edge), *edge.extras)
                extras += tuple(extra for extra in candidates if extra not in extras)
            if thread.execution is not None:
                gate = thread.execution.gate
        if not (tracked or extras or gate is not None):
            return Sent(self, peer)
        number = next(self._call_numbers)
        stand_ins = [stand_in(tensor) for tensor in tracked]
        sent = Sent(self, peer, number, stand_ins, extras, gate)
        self._sent[number] = sent
        return sent

    def result(self, state: Any, meta: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Ties the tensors of a reply to the graph; see ``hooks.CallHooks.result``."""
        if state is _NO_GRAD:
            return [tensor.detach() for tensor in tensors]
        if state is _INFERENCE:
            with torch.inference_mode():
                return [_as_inference_tensor(tensor) for tensor in tensors]
        if not isinstance(state, Sent):
            raise ProtocolError("the reply to a call that was not recorded tells of a graph")
        sent = state
        recorded = wire.decode_recorded(meta)
        handle = Lease(sent, recorded.graph, self._drop_later).handle()
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _saving_as(sent),
        ):
            outputs = remote_call(sent, handle, [tensors[i] for i in recorded.tracked])
        tensors = list(tensors)
        for i, output in zip(recorded.tracked, outputs, strict=True):
            tensors[i] = output
        return tensors

    def backward(self, sent: Sent, lease: Lease, gradients: Gradients) -> list[torch.Tensor | None]:
        """Has the callee run the backward of a call; runs inside the node's backward.

        Args:
            sent: The call.
            lease: The graph at the callee.
            gradients: Those of the call's outputs.

        Returns:
            The gradients of ``sent.inputs``.
        """
        run = passes.running()
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        context = None if run is None else run.context
        accumulate = context is not None or wants_parameters()
        create = torch.is_grad_enabled()
        arguments = (
            lease.graph,
            list(gradients),
            accumulate,
            keep,
            create,
            *(() if context is None else (context.id, context.creator)),
        )
        if not keep:
            lease.spent = True
        if context is not None:
            context.meet(sent.peer)
        # Checkpointing may have made the call again: then the graph is that of the other call.
        # It is for this one's inputs all the same.
        names = [number for number, _ in lease.sent.extras]
        extras = tuple(zip(names, (extra for _, extra in sent.extras), strict=True))
        # Under create_graph the remote backward is a remote call that is itself recorded, and
        # whose graph leads to the inputs of this one, too.
        before = thread.extras
        if create and lease.sent.number:
            extras = ((lease.sent.number, sent), *extras)
        thread.extras = extras if create else ()
        try:
            future = self.agent.call(sent.peer, _run_backward, arguments, hooks=create)
        finally:
            thread.extras = before
        own, others = future.wait()
        return self._distribute(sent, names, own, others, accumulate)

    def _distribute(
        self,
        sent: Sent,
        names: Sequence[int],
        own: Gradients,
        others: Iterable[tuple[Key, Gradients]],
        accumulate: bool,
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of ``sent.inputs``; passes on what is not for them."""
        me = self.agent.incarnation
        run = passes.running()
        for_extras: dict[int, list[torch.Tensor | None]] = {}
        for key, gradients in others:
            caller, number = key
            if caller == me and number in names:
                for_extras[number] = passes.add(for_extras.get(number), gradients)
            elif run is not None and (caller != me or run.context is not None):
                run.capture(key, gradients)
            elif accumulate:
                self.deliver(key, gradients)
            else:
                raise GraphLostError(
                    f"the backward on worker {sent.peer.name!r} reached tensors that "
                    f"{self._name(caller)} sent with another call, through a value kept there; "
                    "torch.autograd.grad and backward(inputs=...) cannot follow such a path: "
                    "use backward(), or return the value to the caller and send it again"
                )
        result = list(own) or [None] * len(sent.stand_ins)
        for name, (_, extra) in zip(names, sent.extras, strict=True):
            result += for_extras.get(name) or [None] * len(extra.stand_ins)
        return result if sent.gate is None else [*result, None]

    def deliver(self, key: Key, gradients: Gradients) -> None:
        """Has the caller of a call take gradients of the tensors that it sent.

        Raises:
            OwnerLostError: If it is gone.
            GraphLostError: If it has dropped what came of the call, and the tensors with it.
        """
        caller, number = key
        if caller != self.agent.incarnation:
            peer = self.agent.peer_by_incarnation(caller)
            if peer is None:
                raise OwnerLostError(
                    "the backward reached tensors that a process had sent which is gone"
                )
            self.agent.call(peer, _take, (number, list(gradients)), hooks=False).wait()
            return
        sent = self._sent.get(number)
        if sent is None:
            raise GraphLostError(
                "the backward reached tensors that were sent with an earlier call, through a "
                "value kept on the worker, but the results of that call have been dropped, and "
                "the tensors' graph with them: keep the results, or use a "
                "distributed autograd context, which keeps what its calls need"
            )
        pairs = [
            (stand_in, gradient)
            for stand_in, gradient in zip(sent.stand_ins, gradients, strict=True)
            if gradient is not None
        ]
        # Retained: the pass that led here may have to go through these nodes as well.
        torch.autograd.backward(
            [stand_in for stand_in, _ in pairs],
            [gradient for _, gradient in pairs],
            retain_graph=True,
        )

    # The callee's side.

    def execute(self, data: bytes, src: PeerInfo, tensors: list[torch.Tensor]) -> Execution:
        """Takes a request; see ``hooks.CallHooks.execute``."""
        meta = wire.decode_meta(data)
        context = None
        if meta.context:
            context = self.contexts.enter(meta.context, meta.creator)
            context.meet(src)
        received = gate = None
        if meta.number:
            received = Received(self, (src.incarnation, meta.number), len(meta.tracked))
            self._received[received.key] = received
            taken = [tensors[i] for i in meta.tracked]
            if meta.gated:
                taken.append(torch.zeros(()))
            with torch.enable_grad():
                given = received_tensors(received, taken)
            tensors = list(tensors)
            for i, tensor in zip(meta.tracked, given, strict=False):
                tensors[i] = tensor
            if meta.gated:
                gate = given[-1]
        return Execution(self, src, meta, tensors, received, gate, context)

    def record(
        self,
        src: PeerInfo,
        meta: wire.Meta,
        received: Received | None,
        tensors: Sequence[torch.Tensor],
        copies: frozenset[int],
        *,
        shared: bool,
    ) -> tuple[bytes, int]:
        """Keeps the graph of a result.

        Args:
            src: The caller.
            meta: What it told of itself.
            received: The tensors of the request, if any may get gradients.
            tensors: The tensors of the result.
            copies: Positions of those that travel as copies without a past.
            shared: Whether the result was there before the request.

        Returns:
            The meta of the reply, and the graph's number, 0 if there is none.
        """
        tracked = _tracked(tensors, copies)
        if not meta.grad:
            return (wire.PLAIN_RESULT if tracked or meta.inference else b""), 0
        if not tracked:
            return b"", 0
        number = next(self._graph_numbers)
        outputs = [edge_of(tensors[i]) for i in tracked]
        self._graphs[number] = Graph(src.incarnation, outputs, received, shared)
        if self.agent.peer_by_incarnation(src.incarnation) is None:  # left meanwhile
            self.drop([number])
        return wire.encode(wire.Recorded(number, tracked)), number

    def run_backward(
        self,
        number: int,
        gradients: Gradients,
        accumulate: bool,
        keep: bool,
        create: bool,
        context: DistAutogradContext | None = None,
    ) -> Answer:
        """Runs the backward of a graph that this process keeps for the caller.

        Args:
            number: The graph.
            gradients: Those of its outputs, None for unused ones.
            accumulate: Whether the leaves get gradients, in ``.grad`` or in the context.
            keep: Whether the graph is kept.
            create: Whether the gradients get a graph of their own.
            context: The distributed autograd context.

        Raises:
            GraphLostError: If there is no such graph.
            RuntimeError: Whatever torch objects to, with an explanation where a parameter was
                changed since the forward.
        """
        graph = self._graphs.get(number) if keep else self._graphs.pop(number, None)
        if graph is None:
            raise GraphLostError(
                f"worker {self.agent.info.name!r} does not have the graph of the call any more: "
                "a backward through it has failed, or the caller was thought dead"
            )
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(graph.outputs, gradients, strict=True)
            if gradient is not None
        ]
        edges = [edge for edge, _ in pairs]
        given = [gradient for _, gradient in pairs]
        if context is not None:
            run = context.run(edges, given)
        else:
            run = Pass(accumulate)
            # Nodes may be shared with the graphs of other calls. Where it is dropped after
            # this, the graph is freed as a whole.
            retain = keep or graph.shared or bool(self._graphs)
            run.watch(edges)
            try:
                with run:
                    self._differentiate(edges, given, accumulate, retain, create)
            except RuntimeError as error:
                raise _explained(error) from error
        received = graph.received
        own = None if received is None else run.take(received.key)
        return own or [], list(run.gradients.items())

    def _differentiate(
        self, edges: Any, gradients: Any, accumulate: bool, retain: bool, create: bool
    ) -> None:
        if accumulate:
            torch.autograd.backward(edges, gradients, retain_graph=retain, create_graph=create)
            return
        origins = [received.origin for received in list(self._received.values())]
        if origins:
            torch.autograd.grad(
                edges,
                origins,
                gradients,
                retain_graph=retain,
                create_graph=create,
                allow_unused=True,
            )

    def drop(self, numbers: Iterable[int]) -> None:
        """Lets go of graphs; those that are gone already are passed over."""
        for number in numbers:
            self._graphs.pop(number, None)

    @property
    def live_graphs(self) -> int:
        """How many graphs this process keeps for others."""
        return len(self._graphs)

    def stats(self) -> dict[str, float]:
        """Returns the counts that the broker's status shows."""
        return {"graphs": len(self._graphs), "autograd_contexts": len(self.contexts)}

    # Housekeeping.

    def _drop_later(self, peer: PeerInfo, graph: int) -> None:
        self._dropped.append((peer, graph))
        self.agent.wake()

    def discard(self, src: PeerInfo, meta: bytes) -> None:
        """A reply has come that nobody waits for any more: its graph is not wanted."""
        if meta and meta != wire.PLAIN_RESULT:
            self._drop_later(src, wire.decode_recorded(meta).graph)

    def flush(self) -> None:
        """Tells the workers which graphs are not wanted any more; must not block."""
        if self._dropped:
            self.agent.executor.submit(self._send_drops)

    def _send_drops(self) -> None:
        graphs: dict[int, list[int]] = {}
        while self._dropped:
            peer, graph = self._dropped.popleft()
            graphs.setdefault(peer.incarnation, []).append(graph)
        for incarnation, numbers in graphs.items():
            peer_now = self.agent.peer_by_incarnation(incarnation)
            if peer_now is not None:
                future = self.agent.call(peer_now, _drop, (numbers,), timeout=0, hooks=False)
                future._retrieved = True  # if it fails, the worker is gone, or this process is

    def _peer_left(self, departure: Departure) -> None:
        gone = departure.peer.incarnation
        self.drop([n for n, graph in list(self._graphs.items()) if graph.caller == gone])
        self.contexts.peer_left(gone)

    def _name(self, incarnation: int) -> str:
        peer = self.agent.peer_by_incarnation(incarnation)
        if incarnation == self.agent.incarnation:
            return "this process"
        return "a process that has left" if peer is None else f"worker {peer.name!r}"


_engine: Engine | None = None
_engine_lock = threading.Lock()


def engine() -> Engine:
    """Returns the remote autograd of this process's agent.

    Raises:
        NotInitializedError: If there is no agent.
    """
    global _engine
    agent = current.agent()
    known = _engine
    if known is not None and known.agent is agent:
        return known
    with _engine_lock:
        if _engine is None or _engine.agent is not agent:
            _engine = Engine(agent)
        return _engine


def existing_engine() -> Engine | None:
    """Returns the remote autograd of this process, if it has had anything to do."""
    known = _engine
    return known if known is not None and current.is_set() else None


@wire_safe(gradients=True)
def _run_backward(
    graph: int,
    gradients: Gradients,
    accumulate: bool,
    keep: bool,
    create: bool,
    context_id: int = 0,
    creator: int = 0,
) -> Answer:
    here = engine()
    if not context_id:
        return here.run_backward(graph, gradients, accumulate, keep, create)
    with named_errors(here.agent.info.id):
        context = here.contexts.enter(context_id, creator)
        return here.run_backward(graph, gradients, accumulate, keep, create, context)


@wire_safe(gradients=True)
def _take(number: int, gradients: Gradients) -> None:
    engine().deliver((engine().agent.incarnation, number), gradients)


@wire_safe(gradients=True)
def _drop(graphs: list[int]) -> None:
    engine().drop(graphs)


def _tracked(tensors: Sequence[torch.Tensor], copies: frozenset[int]) -> list[int]:
    """Returns the positions of the tensors that have a gradient."""
    return [i for i, tensor in enumerate(tensors) if tensor.requires_grad and i not in copies]


def _as_inference_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an inference tensor with the same memory."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return tensor.detach()
    result = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return result.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _saving_as(sent: Sent) -> Any:
    """Returns the context in which a node saves as one made by the call itself would."""
    here: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if here is None and sent.hooks is None:
        return nullcontext()
    return saved_tensors_hooks(*(sent.hooks or (_same, _same)))


def _same(value: Any) -> Any:
    return value


def _explained(error: RuntimeError) -> RuntimeError:
    text = str(error)
    if "modified by an inplace operation" not in text:
        return error
    return type(error)(
        f"{text}\nThe graph is that of a remote call: a parameter or buffer of the module has "
        "been changed between the call and its backward, probably by the optimizer step of "
        "another client that trains the same module. Call again after the step, or have the "
        "clients take turns."
    )
