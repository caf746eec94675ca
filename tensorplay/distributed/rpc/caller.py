"""The caller's side: sends requests and completes their futures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorplay.distributed.rpc import allow, hooks, internal, payload, remote_exception, shm
from tensorplay.distributed.rpc.calls import CallTable, Failed, PendingCall
from tensorplay.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from tensorplay.distributed.rpc.executor import Executor
from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.inbound import Frame, Message
from tensorplay.distributed.rpc.meters import Meters
from tensorplay.distributed.rpc.options import BrokerRpcBackendOptions
from tensorplay.distributed.rpc.roster import PeerRoster
from tensorplay.distributed.rpc.rref_context import Exporter, RRefContext
from tensorplay.distributed.rpc.rules import Rules
from tensorplay.distributed.rpc.shm import Leases
from tensorplay.errors import MessageTooLargeError, RpcTimeoutError, WorkerLostError
from tensorplay.protocol import wire
from tensorplay.protocol.calls import Op, RefChanges, Reply, Request, Status
from tensorplay.protocol.messages import Kind, PeerInfo, Route, Undeliverable
from tensorplay.protocol.refs import Adds, Releases, RRefKey

#: Threads that decode replies which nobody waits for and run the callbacks of futures.
COMPLETION_THREADS = 4
#: Name of the calls that tell an owner of references; they are not the user's.
_COUNTS = "reference counts"


class Caller:
    """Sends requests, and completes the futures of those that are answered, late or lost.

    Args:
        me: Incarnation of this process.
        name: Name of this process.
        options: Default time-out and device maps.
        roster: Who is there.
        rrefs: The remote references of this process.
        dispatch: Sends a request: route, header, payload frames.
        cancel: Tells a callee that a request's result is not wanted any more.
        leases_for: Returns what gives memory that a peer shares, if it does.
        meters: Where durations are counted.
        rules: What the peers may have this one load.
    """

    def __init__(
        self,
        me: int,
        name: str,
        options: BrokerRpcBackendOptions,
        roster: PeerRoster,
        rrefs: RRefContext,
        dispatch: Callable[[Route, Request, Sequence[Frame]], None],
        cancel: Callable[[PeerInfo, int], None],
        leases_for: Callable[[PeerInfo], Leases | None],
        meters: Meters,
        rules: Rules,
    ) -> None:
        self.rpc_timeout = options.rpc_timeout
        self.completions = Executor(COMPLETION_THREADS, f"tensorplay-{name}-replies")
        self._me = me
        self._options = options
        self._roster = roster
        self._rrefs = rrefs
        self._dispatch = dispatch
        self._send_cancel = cancel
        self._leases_for = leases_for
        self._meters = meters
        self._rules = rules
        self._calls = CallTable()
        self._refs_lock = threading.RLock()  # a finalizer may call in here

    def __len__(self) -> int:
        return len(self._calls)

    # Sending.

    def call(
        self,
        peer: PeerInfo,
        function: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float,
        recorded: bool,
        op: Op,
        rref: RRefKey | None,
    ) -> Future[Any]:
        """Sends a request and returns the future of its result; see ``Agent.call``."""
        seconds = self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else float(timeout)
        device_map = self._options.device_maps.get(peer.name)
        exporter = self._rrefs.exporter(peer.incarnation, kept=True)
        recorder = _Recorder(peer, recorded, exporter)
        leases = self._leases_for(peer)
        frames: Sequence[Frame] = ()
        call: PendingCall | None = None
        try:
            if op is Op.FETCH:
                recorder.record_fetch(args)
            else:
                frames = payload.pack(
                    (function, tuple(args), kwargs),
                    exporter=exporter,
                    device_map=device_map,
                    tensors_hook=recorder.record,
                    custom=internal.custom_pickler(),
                    leases=leases,
                )
            what = "to_here()" if op is Op.FETCH else _name(function)
            call = PendingCall(self._calls.next_id(), peer, what, self._decode, recorder.state)
            if op is Op.REMOTE:
                call.future._recorded = recorder.state
            blocks, frames = shm.hand_over(frames, leases)
            call.exporter = exporter  # holds the references until the callee has them
            self._send(
                call,
                Request(
                    op,
                    timeout=seconds,
                    rref=rref,
                    refs=exporter.tokens,
                    meta=recorder.meta,
                    devices=payload.inverse(device_map),
                    blocks=blocks,
                ),
                frames,
            )
        except BaseException:
            if call is not None:
                self._calls.pop(call.id)
            if leases is not None:
                leases.undo()
            exporter.undo()
            raise
        return call.future

    def flush_refs(self) -> None:
        """Sends the reference counts that are due, before whatever is sent next."""
        with self._refs_lock:
            for owner, adds, releases in self._rrefs.drain():
                self._send_refs(owner, adds, releases)

    def _send(self, call: PendingCall, request: Request, frames: Sequence[Frame]) -> None:
        call.future._cancel = lambda: self._cancel(call)
        self._calls.add(call, request.timeout)
        # Counts first: whoever is told of a reference by the request must be known by then.
        if request.op is not Op.REFS:
            self.flush_refs()
        route = Route(Kind.REQUEST, call.peer.incarnation, self._me, call.id)
        self._dispatch(route, request, frames)

    def _send_refs(self, owner: int, adds: Adds, releases: Releases) -> None:
        """Tells the owner of references who else holds them and what was let go."""
        peer = self._roster.get(owner)
        if peer is None:  # nothing is owed to the dead
            return
        call = PendingCall(self._calls.next_id(), peer, _COUNTS, self._decode)
        call.future._retrieved = True
        if adds:
            call.future.add_done_callback(lambda _: self._rrefs.acknowledged(owner))
        self._send(call, Request(Op.REFS), [wire.encode(RefChanges(adds, releases))])

    def probe(self, peer: PeerInfo, offer: bytes, answered: Callable[[bytes], None]) -> None:
        """Asks a peer whether it can map memory of this process.

        Args:
            peer: The peer.
            offer: What memory.
            answered: Is called with the peer's answer, in a thread of the pool.
        """

        def decode(call: PendingCall, message: Message) -> None:
            if message.header.status is Status.OK:  # type: ignore[union-attr]
                answered(bytes(message.frames[0]))

        call = PendingCall(self._calls.next_id(), peer, "probe of shared memory", decode)
        call.future._retrieved = True
        self._send(call, Request(Op.PROBE), [offer])

    def _cancel(self, call: PendingCall) -> None:
        if self._calls.pop(call.id) is not None:
            with self._refs_lock:
                self._meters.cancelled += 1
            self._send_cancel(call.peer, call.id)

    # Completing.

    def complete(self, message: Message, src: PeerInfo) -> None:
        """Takes a reply."""
        reply = message.header
        call = self._calls.pop_if_to(message.route.id, src.incarnation)
        self._rrefs.received(reply.refs, src.incarnation)
        if call is not None:
            if call.what is not _COUNTS:
                self._meters.made.add(time.monotonic() - call.began)
            call.arrive(message, self.completions.submit)
            return
        # Timed out or cancelled.
        self._meters.discarded += 1
        self._rrefs.settle(reply.refs)
        if reply.meta:
            hooks.current().discard(src, reply.meta)

    def undeliverable(self, report: Undeliverable) -> bool:
        """Fails a call whose request, or a chunk of it, was refused.

        Returns:
            Whether it was one of this process's calls.
        """
        call = self._calls.pop_if_to(report.id, report.dst)
        if call is None:
            return False
        call.fail(MessageTooLargeError(report.text), self.completions.submit)
        return True

    def lose_unknown(self, incarnation: int, text: str) -> None:
        """Fails the calls to a peer that is not even known to have gone."""
        for call in self._calls.to(incarnation):
            error = WorkerLostError(f"{call.what} on {call.peer.name!r}: {text}")
            call.fail(error, self.completions.submit)

    def expire(self, now: float) -> float:
        """Fails the calls whose time is up; returns when the next one's is."""
        for call in self._calls.expired(now):
            self._meters.expired += 1
            call.fail(
                RpcTimeoutError(
                    f"RPC ran for more than set timeout ({call.timeout * 1000:.0f} ms) and will "
                    f"now be marked with an error: {call.what} on {call.peer.name!r}, request "
                    f"{call.id}"
                ),
                self.completions.submit,
            )
            self._send_cancel(call.peer, call.id)
        return self._calls.next_deadline()

    def lose(self, peer: PeerInfo, reason: str) -> None:
        """Fails the calls to a peer that is gone."""
        calls = self._calls.to(peer.incarnation)
        for call in calls:
            call.fail(
                WorkerLostError(
                    f"worker {peer.name!r} (id {peer.id}) died while running {call.what} "
                    f"(request {call.id}, {len(calls)} in flight to it from here): {reason}"
                ),
                self.completions.submit,
            )

    def fail_all(self, error: BaseException) -> None:
        """Fails every call in flight."""
        for call in self._calls.to(None):
            call.fail(error, self.completions.submit)

    def wait_idle(self, timeout: float | None) -> bool:
        """Waits until no call is in flight; returns whether that came about."""
        return self._calls.wait_empty(timeout)

    def _decode(self, call: PendingCall, message: Message) -> Any:
        guard = self._rules.of_reply(call.peer)
        if guard is allow.current():  # None, as a rule
            return self._decode_guarded(call, message)
        with allow.guarding(guard):
            return self._decode_guarded(call, message)

    def _decode_guarded(self, call: PendingCall, message: Message) -> Any:
        reply = message.header
        assert isinstance(reply, Reply)
        try:
            if reply.status is Status.ERROR:
                return Failed(remote_exception.rebuild(remote_exception.decode(message.frames[0])))
            if not message.frames:
                return None
            return payload.unpack(
                message.frames,
                importer=self._rrefs.importer(message.route.src),
                tensors_hook=(
                    (lambda tensors: hooks.current().result(call.state, reply.meta, tensors))
                    if reply.meta
                    else None
                ),
                custom=internal.custom_pickler(),
            )
        finally:
            self._rrefs.settle(reply.refs)


class _Recorder:
    """Shows autograd the tensors of a request while it is packed."""

    def __init__(self, peer: PeerInfo, enabled: bool, exporter: Exporter) -> None:
        self._peer = peer
        self._enabled = enabled
        self._exporter = exporter
        self.meta = b""
        self.state: Any = None

    def record(self, tensors: list[torch.Tensor], copies: frozenset[int]) -> None:
        """Takes the tensors among the arguments."""
        if self._enabled:
            self.meta, self.state = hooks.current().request(
                tensors, self._peer, self._exporter.rrefs, copies
            )

    def record_fetch(self, rrefs: Sequence[Any]) -> None:
        """Takes the reference whose value is fetched."""
        if self._enabled:
            self.meta, self.state = hooks.current().request([], self._peer, rrefs, frozenset())


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or getattr(function, "name", function))
