"""The caller's side: sends requests and completes their futures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from tensorplay.distributed.rpc import (
    allow,
    callables,
    hooks,
    internal,
    payload,
    plain,
    remote_exception,
    shm,
    tracing,
)
from tensorplay.distributed.rpc.callables import Told
from tensorplay.distributed.rpc.calls import CallTable, Failed, PendingCall
from tensorplay.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from tensorplay.distributed.rpc.executor import Executor
from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.inbound import Frame, Message
from tensorplay.distributed.rpc.meters import Meters
from tensorplay.distributed.rpc.options import BrokerRpcBackendOptions
from tensorplay.distributed.rpc.payload import PackHook, UnpackHook
from tensorplay.distributed.rpc.roster import PeerRoster
from tensorplay.distributed.rpc.rref_context import Exporter, RRefContext
from tensorplay.distributed.rpc.rules import Rules
from tensorplay.distributed.rpc.shm import Leases
from tensorplay.errors import MessageTooLargeError, RpcTimeoutError, WorkerLostError
from tensorplay.protocol import wire
from tensorplay.protocol.calls import Block, Op, RefChanges, Reply, Request, Status
from tensorplay.protocol.messages import Kind, PeerInfo, Undeliverable
from tensorplay.protocol.refs import Adds, Releases, RRefKey

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.rref import RRef

#: Threads that decode replies which nobody waits for and run the callbacks of futures.
COMPLETION_THREADS = 4
#: Name of the calls that tell an owner of references; they are not the user's.
_COUNTS = "reference counts"
_PROBE = "probe of shared memory"


class Caller:
    """Sends requests, and completes the futures of those that are answered, late or lost.

    Args:
        me: Incarnation of this process.
        name: Name of this process.
        options: Default time-out and device maps.
        roster: Who is there.
        rrefs: The remote references of this process.
        dispatch: Sends a request: kind, incarnation of the callee, id, header, payload frames;
            returns whether it goes in one message.
        when_sent: Has a function called when what is dispatched next has been sent.
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
        dispatch: Callable[[Kind, int, int, Request, Sequence[Frame]], bool],
        when_sent: Callable[[Callable[[], None]], None],
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
        self._when_sent = when_sent
        self._send_cancel = cancel
        self._leases_for = leases_for
        self._meters = meters
        self._rules = rules
        self._calls = CallTable()
        self._told = Told()
        self._refs_lock = threading.RLock()  # a finalizer may call in here
        self._flushing = 0

    def __len__(self) -> int:
        return len(self._calls)

    # Sending.

    def call(
        self,
        peer: PeerInfo,
        function: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: float,
        recorded: bool,
        op: Op,
        rref: RRefKey | None,
        subject: RRef[Any] | None,
    ) -> Future[Any]:
        """Sends a request and returns the future of its result; see ``Agent.call``."""
        kwargs = kwargs or {}
        call = PendingCall(self._calls.next_id(), peer, function, self._decode, self._give_up)
        device_maps = self._options.device_maps
        device_map = device_maps.get(peer.name) if device_maps else None
        custom = internal.custom_pickler()
        numbered = None if custom is not None else callables.find(function)
        exporter: Exporter | None = None
        leases: Leases | None = None
        frames: Sequence[Frame]
        try:
            packed = None
            if numbered is not None:
                packed = plain.pack(args, kwargs, device_map, lambda: self._leases_for(peer))
            if packed is not None:
                frames, leases = packed.frames, packed.leases
                if recorded:
                    _record(call, packed.tensors, () if subject is None else (subject,))
            elif op is Op.FETCH:
                frames = ()
                if recorded:
                    _record(call, [], args)
            else:
                exporter = self._rrefs.exporter(peer.incarnation, kept=True)
                leases = self._leases_for(peer)
                frames = payload.pack(
                    (function if numbered is None else None, tuple(args), kwargs),
                    exporter=exporter,
                    device_map=device_map,
                    tensors_hook=_recorder(call, exporter, subject) if recorded else None,
                    custom=custom,
                    leases=leases,
                )
            call.kept = (exporter, subject)  # the references, until the callee has them
            if op is Op.REMOTE:
                call.future._recorded = call.state
            blocks: list[Block] = _NONE
            if leases is not None:
                blocks, frames = shm.hand_over(frames, leases)
            if tracing.active:
                call.trace = tracing.begin(call)
            if profiler._is_profiler_enabled:
                _show(call)
            self._calls.add(
                call, self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else float(timeout)
            )
            # Asked after the call is entered: if the callee is lost, so is the call.
            told = self._told.to(peer.incarnation)
            number, definition = (0, b"") if numbered is None else numbered
            request = Request(
                op,
                call.timeout,
                rref if subject is None else subject._key,
                _NONE if exporter is None else exporter.tokens,
                call.meta,
                _NONE,
                payload.inverse(device_map) if device_map else _NO_DEVICES,
                blocks,
                number,
                b"" if number in told else definition,
                call.trace is not None,
                tracing.context() if tracing.active else {},
            )
            # Counts first: whoever is told of a reference by the request must be known by then.
            self.flush_refs()
            if call.trace is not None:
                self._when_sent(call.trace.sent)
            whole = self._dispatch(Kind.REQUEST, peer.incarnation, call.id, request, frames)
        except BaseException:
            self._calls.pop(call.id)
            if leases is not None:
                leases.undo()
            if exporter is not None:
                exporter.undo()
            raise
        # What comes in chunks may be overtaken; what needs shared memory may not come at all.
        if request.definition and whole and not blocks:
            told.add(number)
        return call.future

    def flush_refs(self) -> None:
        """Sends the reference counts that are due, before whatever is sent next."""
        # Whoever sends some says so before they are not due any more.
        if not self._rrefs.due and not self._flushing:
            return
        with self._refs_lock:
            self._flushing += 1
            try:
                for owner, adds, releases in self._rrefs.drain():
                    self._send_refs(owner, adds, releases)
            finally:
                self._flushing -= 1

    def _send_refs(self, owner: int, adds: Adds, releases: Releases) -> None:
        """Tells the owner of references who else holds them and what was let go."""
        peer = self._roster.get(owner)
        if peer is None:  # nothing is owed to the dead
            return
        call = PendingCall(self._calls.next_id(), peer, _COUNTS, self._decode, self._give_up)
        call.future._retrieved = True
        if adds:
            call.future.add_done_callback(lambda _: self._rrefs.acknowledged(owner))
        self._calls.add(call)
        changes = wire.encode(RefChanges(adds, releases))
        self._dispatch(Kind.REQUEST, owner, call.id, Request(Op.REFS), [changes])

    def probe(self, peer: PeerInfo, offer: bytes, answered: Callable[[bytes], None]) -> None:
        """Asks a peer whether it can map memory of this process.

        Args:
            peer: The peer.
            offer: What memory.
            answered: Is called with the peer's answer, in a thread of the pool.
        """

        def decode(call: PendingCall, message: Message) -> None:
            reply = message.header
            assert isinstance(reply, Reply)
            self._rrefs.settle(reply.refs)
            if reply.status is Status.OK and message.frames:
                answered(bytes(message.frames[0]))

        call = PendingCall(self._calls.next_id(), peer, _PROBE, decode, self._give_up)
        call.future._retrieved = True
        self._calls.add(call)
        self._dispatch(Kind.REQUEST, peer.incarnation, call.id, Request(Op.PROBE), [offer])

    def _give_up(self, call: PendingCall) -> None:
        if self._calls.pop(call.id) is not None:
            with self._refs_lock:
                self._meters.cancelled += 1
            self._send_cancel(call.peer, call.id)

    # Completing.

    def complete(self, message: Message, src: PeerInfo) -> None:
        """Takes a reply."""
        reply = message.header
        call = self._calls.pop_if_to(message.route.id, src.incarnation)
        if reply.refs:
            self._rrefs.received(reply.refs, src.incarnation)
        if call is not None:
            if call.trace is not None:
                call.trace.arrived()
            if call.function is not _COUNTS:
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
        call.arrive(MessageTooLargeError(report.text), self.completions.submit)
        return True

    def lose_unknown(self, incarnation: int, text: str) -> None:
        """Fails the calls to a peer that is not even known to have gone."""
        self._told.forget(incarnation)
        for call in self._calls.to(incarnation):
            error = WorkerLostError(f"{call.what} on {call.peer.name!r}: {text}")
            call.arrive(error, self.completions.submit)

    def expire(self, now: float) -> float:
        """Fails the calls whose time is up; returns when the next one's is."""
        for call in self._calls.expired(now):
            self._meters.expired += 1
            call.arrive(
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
        self._told.forget(peer.incarnation)
        calls = self._calls.to(peer.incarnation)
        for call in calls:
            call.arrive(
                WorkerLostError(
                    f"worker {peer.name!r} (id {peer.id}) died while running {call.what} "
                    f"(request {call.id}, {len(calls)} in flight to it from here): {reason}"
                ),
                self.completions.submit,
            )

    def fail_all(self, error: BaseException) -> None:
        """Fails every call in flight."""
        for call in self._calls.to(None):
            call.arrive(error, self.completions.submit)

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
        frames = message.frames
        try:
            if reply.status is Status.ERROR:
                return Failed(remote_exception.rebuild(remote_exception.decode(frames[0])))
            if not frames:
                return None
            tensors_hook = _result_hook(call, reply.meta) if reply.meta else None
            custom = internal.custom_pickler()
            if custom is None and plain.is_plain(frames):
                return plain.unpack_result(frames, tensors_hook)
            return payload.unpack(
                frames,
                importer=self._rrefs.importer(message.route.src),
                tensors_hook=tensors_hook,
                custom=custom,
            )
        finally:
            if reply.refs:
                self._rrefs.settle(reply.refs)
            if call.trace is not None:
                call.trace.done(reply.trace)


# Shared by all requests, and never changed.
_NO_COPIES: frozenset[int] = frozenset()
_NONE: list[Any] = []
_NO_DEVICES: dict[str, str] = {}


def _show(call: PendingCall) -> None:
    """Has torch's profiler show the call as a range, from now until its future is complete."""
    record = profiler.record_function(f"tensorplay: {call.what} on {call.peer.name}")
    record.__enter__()  # type: ignore[no-untyped-call]
    record._call_end_callbacks_on_future(call.future)


def _record(call: PendingCall, tensors: list[torch.Tensor], rrefs: Sequence[RRef[Any]]) -> None:
    """Shows autograd the tensors and references of a request."""
    call.meta, call.state = hooks.current().request(tensors, call.peer, rrefs, _NO_COPIES)


def _recorder(call: PendingCall, exporter: Exporter, subject: RRef[Any] | None) -> PackHook:
    """Returns what shows autograd the tensors of a request while it is pickled."""

    def record(tensors: list[torch.Tensor], copies: frozenset[int]) -> None:
        rrefs = exporter.rrefs if subject is None else [subject, *exporter.rrefs]
        call.meta, call.state = hooks.current().request(tensors, call.peer, rrefs, copies)

    return record


def _result_hook(call: PendingCall, meta: bytes) -> UnpackHook:
    """Returns what has autograd take the tensors of a reply."""
    return lambda tensors: hooks.current().result(call.state, meta, tensors)
