"""The callee's side: runs what others ask for and answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from tensorplay.distributed.rpc import (
    allow,
    hooks,
    internal,
    payload,
    plain,
    remote_exception,
    shm,
    tracing,
)
from tensorplay.distributed.rpc.callables import Definitions
from tensorplay.distributed.rpc.constants import ASYNC_EXECUTION_MARK
from tensorplay.distributed.rpc.executor import Executor
from tensorplay.distributed.rpc.inbound import Frame, Message
from tensorplay.distributed.rpc.meters import Meters
from tensorplay.distributed.rpc.payload import UnpackHook
from tensorplay.distributed.rpc.rref import RRef
from tensorplay.distributed.rpc.rref_context import Entry, RRefContext
from tensorplay.distributed.rpc.rules import Rules
from tensorplay.distributed.rpc.serving import here
from tensorplay.distributed.rpc.shm import SharedMemory
from tensorplay.distributed.rpc.tensors import DeviceMap
from tensorplay.errors import (
    AsyncResultError,
    BrokerError,
    ProtocolError,
    RpcTimeoutError,
    RRefError,
    WorkerLostError,
)
from tensorplay.protocol.calls import Op, Reply, Request, Status, decode_changes
from tensorplay.protocol.messages import PeerInfo

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """A request that has not been answered.

    Attributes:
        message: The request.
        request: Its header.
        src: Who asks.
        began: When it has come, by this process's clock.
        expires: When the caller stops waiting, by the same clock.
        taken: Whether a thread of the pool has taken it. Set before it looks at ``cancelled``,
            while that is set before ``taken`` is looked at: one of the two sees the other.
        cancelled: Whether the caller has said that it does not want the result.
        execution: What autograd keeps of the call while it runs.
        service: Where its times are noted, if it is traced.
        subject: The object to which the function's first argument refers, or why it is not
            here.
    """

    message: Message
    request: Request
    src: PeerInfo
    began: float
    expires: float
    taken: bool = False
    cancelled: bool = False
    execution: hooks.Execution | None = None
    service: tracing.Service | None = None
    subject: Entry | RRefError | WorkerLostError | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The caller's incarnation, and its number for the request."""
        return self.src.incarnation, self.message.route.id


class Callee:
    """Runs requests on a pool and sends the replies.

    Args:
        me: This process.
        rrefs: The remote references of this process.
        executor: The pool.
        reply: Sends a reply: incarnation of the caller, id, header, payload frames.
        consumed: Grants a sender credit for so many bytes.
        shared: The memory that this process shares with others.
        meters: Where durations and failures are counted.
        rules: What the peers may have this one load and call.
    """

    def __init__(
        self,
        me: PeerInfo,
        rrefs: RRefContext,
        executor: Executor,
        reply: Callable[[int, int, Reply, Sequence[Frame]], None],
        consumed: Callable[[int, int], None],
        shared: SharedMemory,
        meters: Meters,
        rules: Rules,
    ) -> None:
        self._me = me
        self._rrefs = rrefs
        self._executor = executor
        self._send_reply = reply
        self._consumed = consumed
        self._shared = shared
        self._meters = meters
        self._rules = rules
        self._definitions = Definitions()
        self._jobs: dict[tuple[int, int], Job] = {}
        self._drained = threading.Condition()
        self._leaving = False
        self._draining = 0  # threads that wait until there is no job
        self._counting = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def unwanted(self) -> int:
        """Returns how many requests are worked on whose callers have stopped waiting."""
        return sum(job.cancelled for job in list(self._jobs.values()))

    def accept(self, message: Message, src: PeerInfo) -> None:
        """Takes a request; never blocks and runs no user code."""
        request = message.header
        assert isinstance(request, Request)
        now = time.monotonic()
        expires = now + request.timeout if request.timeout else float("inf")
        job = Job(message, request, src, now, expires)
        if request.trace:
            job.service = tracing.Service(self._me.name, message.route.id, now)
        if request.refs:
            self._rrefs.received(request.refs, src.incarnation)
        if request.op in (Op.REFS, Op.PROBE):
            try:
                answer = self._of_this_library(job)
            finally:
                self._release(job)
            self._answer(job, Reply(Status.OK), answer)
            return
        if self._leaving:
            self._release(job)  # the caller will be told that this process has left
            return
        if job.key in self._jobs:
            self._release(job)
            raise ProtocolError(f"its request {message.route.id} is in progress already")
        if request.definition:
            self._learn(job)
        if request.op is Op.FETCH and (refusal := self._rules.refusal_of_fetch(src)) is not None:
            self._release(job)
            self.refuse(src.incarnation, message.route.id, refusal)
            return
        self._jobs[job.key] = job
        if request.op is Op.FETCH:
            self._release(job)
            assert request.rref is not None
            future = self._rrefs.entry_future(request.rref, src.incarnation)
            future.add_done_callback(lambda done: self._executor.submit(self._fetched, job, done))
            return
        if request.op is Op.REMOTE:
            assert request.rref is not None
            self._rrefs.expect(request.rref, src.incarnation)
        elif request.rref is not None:
            # Now: the caller may let go of the object in its next message.
            job.subject = self._rrefs.find(request.rref, src.incarnation)
        self._executor.submit(self._run, job)

    def _of_this_library(self, job: Job) -> list[Frame]:
        """Does what a request asks for that runs no user code; returns the reply's payload."""
        frame = job.message.frames[0] if job.message.frames else b""
        if job.request.op is Op.PROBE:
            return [self._shared.answer(job.src, frame)]
        changes = decode_changes(frame)
        self._rrefs.apply(job.src.incarnation, changes.adds, changes.releases)
        return []

    def _learn(self, job: Job) -> None:
        request = job.request
        try:
            self._definitions.learn(job.src.incarnation, request.function, request.definition)
        except ProtocolError:
            self._release(job)
            raise

    def leave(self) -> None:
        """Runs nothing that comes from now on; what has come goes on."""
        self._leaving = True

    def cancel(self, src: int, id: int) -> None:
        """Drops a request whose caller does not want the result, or the result if it runs."""
        job = self._jobs.get((src, id))
        if job is not None:
            self._give_up(job)

    def reply_lost(self, src: int, id: int, why: str) -> None:
        """Tells a caller that the reply to its request could not be delivered."""
        self.refuse(src, id, BrokerError(f"the reply could not be delivered: {why}"))

    def refuse(self, src: int, id: int, error: Exception) -> None:
        """Answers a request that cannot be taken with an error."""
        failure = remote_exception.describe(error, self._me.name, self._me.id)
        self._send_reply(src, id, Reply(Status.ERROR), [remote_exception.encode(failure)])

    def peer_left(self, incarnation: int) -> None:
        """Cancels the requests of a peer that is gone."""
        self._definitions.forget(incarnation)
        for job in list(self._jobs.values()):
            if job.src.incarnation == incarnation:
                self._give_up(job)

    def wait_idle(self, timeout: float | None) -> bool:
        """Waits until no request is being worked on; returns whether that came about."""
        with self._drained:
            self._draining += 1
            try:
                return self._drained.wait_for(lambda: not self._jobs, timeout)
            finally:
                self._draining -= 1

    def _run(self, job: Job) -> None:
        job.taken = True
        if job.cancelled or time.monotonic() > job.expires:
            self._drop(job)
            return
        guard = self._rules.of_request(job.src)
        before, here.call = here.call, (job.message.route.id, job.src.name)
        try:
            if job.request.trace or job.request.context:
                self._execute_traced(job, guard)
            elif guard is None:
                self._execute(job)
            else:
                with allow.guarding(guard):
                    self._execute(job)
        finally:
            here.call = before

    def _execute_traced(self, job: Job, guard: allow.Guard | None) -> None:
        with ExitStack() as stack:
            if job.service is not None:
                job.service.began()
                stack.enter_context(tracing.serving(job.service))
            stack.enter_context(tracing.in_context(job.request.context))
            if guard is not None:
                stack.enter_context(allow.guarding(guard))
            self._execute(job)

    def _execute(self, job: Job) -> None:
        try:
            function, args, kwargs = self._unpack(job)
            if (guard := allow.current()) is not None:
                guard.check_request(function, args, kwargs)
            if job.execution is None:
                result = function(*args, **kwargs)
            else:
                with job.execution.activate():
                    result = function(*args, **kwargs)
            if hasattr(function, ASYNC_EXECUTION_MARK):
                self._await_result(job, function, result)
            else:
                self._succeed(job, result)
        except BaseException as error:
            self._fail(job, error)

    def _unpack(self, job: Job) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
        """Returns the function, its positional and its keyword arguments."""
        request = job.request
        src = job.src.incarnation
        frames = job.message.frames
        tensors_hook = _entry_hook(job) if request.meta else None
        custom = internal.custom_pickler()
        function: Callable[..., Any]
        args: Sequence[Any]
        try:
            if custom is None and request.function and plain.is_plain(frames):
                args, kwargs = plain.unpack(frames, tensors_hook)
            else:
                function, args, kwargs = payload.unpack(
                    frames,
                    importer=self._rrefs.importer(src),
                    tensors_hook=tensors_hook,
                    custom=custom,
                )
            if request.function:
                function = self._definitions.resolve(src, request.function)
        finally:
            self._release(job)
        if job.subject is not None:
            if isinstance(job.subject, Exception):
                raise job.subject
            return function, (RRef._of_entry(self._rrefs, job.subject), *args), kwargs
        return function, tuple(args), kwargs

    def _release(self, job: Job) -> None:
        """Lets go of the request's payload: it is unpacked, or never will be."""
        message = job.message
        message.frames = ()
        if job.request.refs:
            self._rrefs.settle(job.request.refs)
        if message.credit:
            self._consumed(job.src.incarnation, message.credit)

    def _await_result(self, job: Job, function: Callable[..., Any], result: Any) -> None:
        if not isinstance(result, torch._C.Future):
            raise AsyncResultError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but {getattr(function, '__qualname__', function)} "
                f"returned {type(result).__name__}"
            )

        def completed(done: torch.futures.Future[Any]) -> None:
            self._executor.submit(self._fetched, job, done)

        result.add_done_callback(completed)

    def _fetched(self, job: Job, done: torch.futures.Future[Any]) -> None:
        try:
            if job.request.op is Op.FETCH and job.request.meta:
                _enter(job, [])
            self._succeed(job, done.value())
        except BaseException as error:
            self._fail(job, error)

    def _succeed(self, job: Job, result: Any) -> None:
        """Keeps or sends the result; raises if it cannot be sent."""
        request = job.request
        if job.service is not None:
            job.service.ran()
        if job.cancelled and request.op is not Op.REMOTE:
            self._discard(job)
            return
        if request.op is Op.REMOTE:
            assert request.rref is not None
            self._rrefs.fulfil(request.rref, result)
            self._answer(job, Reply(Status.OK), [])
            return
        if result is None:
            self._answer(job, _NO_RESULT, ())
            return
        custom = internal.custom_pickler()
        device_map = payload.device_map(request.devices)
        packed = None
        if custom is None:
            packed = plain.pack((result,), {}, device_map, lambda: self._shared.leases_for(job.src))
        if packed is not None:
            self._succeed_plain(job, packed)
            return
        self._succeed_pickled(job, result, device_map, custom)

    def _succeed_plain(self, job: Job, packed: plain.Plain) -> None:
        meta = b""
        try:
            if job.execution is not None and packed.tensors:
                meta = job.execution.reply(packed.tensors, _NO_COPIES)
            if packed.leases is None:
                self._answer(job, Reply(Status.OK, _NONE, meta, _NONE, _NONE), packed.frames)
                return
            blocks, frames = shm.hand_over(packed.frames, packed.leases)
            self._answer(job, Reply(Status.OK, _NONE, meta, _NONE, blocks), frames)
        except BaseException:
            if packed.leases is not None:
                packed.leases.undo()
            raise

    def _succeed_pickled(
        self, job: Job, result: Any, device_map: DeviceMap | None, custom: payload.Pickler | None
    ) -> None:
        meta = b""
        execution = job.execution

        def leave(tensors: list[torch.Tensor], copies: frozenset[int]) -> None:
            nonlocal meta
            if execution is not None:
                meta = execution.reply(tensors, copies)

        exporter = self._rrefs.exporter(job.src.incarnation)
        leases = self._shared.leases_for(job.src)
        try:
            frames = payload.pack(
                result,
                exporter=exporter,
                device_map=device_map,
                tensors_hook=leave,
                custom=custom,
                leases=leases,
            )
            blocks, frames = shm.hand_over(frames, leases)
            reply = Reply(Status.OK, refs=exporter.tokens, meta=meta, blocks=blocks)
            self._answer(job, reply, frames)
        except BaseException:
            if leases is not None:
                leases.undo()
            exporter.undo()
            raise

    def _fail(self, job: Job, error: BaseException) -> None:
        request = job.request
        number, caller = job.message.route.id, job.src.name
        said = {"call": number, "caller": caller}
        _log.warning("call %d of %r raised", number, caller, exc_info=error, extra=said)
        self._meters.error(job.src.name, f"{type(error).__name__}: {error}")
        if job.cancelled and request.op is not Op.REMOTE:
            self._discard(job)
            return
        if job.execution is not None:
            job.execution.failed()
        if request.op is Op.REMOTE and request.rref is not None:
            self._rrefs.fail(request.rref, error)
        failure = remote_exception.describe(error, self._me.name, self._me.id)
        self._answer(job, Reply(Status.ERROR), [remote_exception.encode(failure)])

    def _give_up(self, job: Job) -> None:
        """Notes that the caller has stopped waiting; takes the request out of the queue."""
        job.cancelled = True
        # A reference to the result may be alive though its caller gave up: the pool decides.
        if not job.taken and job.request.op is Op.CALL:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """Drops a request whose caller has stopped waiting before it began."""
        if self._jobs.get(job.key) is not job or self._jobs.pop(job.key, None) is not job:
            return  # another thread was quicker
        with self._counting:
            self._meters.dropped += 1
        self._release(job)
        if job.request.op is Op.REMOTE:
            self._fail(job, RpcTimeoutError("the caller stopped waiting before the call began"))
        self._notify_drained()

    def _discard(self, job: Job) -> None:
        """Drops the result of a request whose caller has stopped waiting meanwhile."""
        if job.execution is not None:
            job.execution.failed()
            job.execution = None
        with self._counting:
            self._meters.discarded += 1
        self._done(job)

    def _answer(self, job: Job, reply: Reply, frames: Sequence[Frame]) -> None:
        if job.service is not None:
            reply = msgspec.structs.replace(reply, trace=job.service.spans())
        self._send_reply(job.src.incarnation, job.message.route.id, reply, frames)
        job.execution = None
        self._done(job)

    def _done(self, job: Job) -> None:
        with self._counting:
            self._meters.served.add(time.monotonic() - job.began)
        if self._jobs.get(job.key) is job:  # not one that took its place
            del self._jobs[job.key]
        self._notify_drained()

    def _notify_drained(self) -> None:
        if self._draining and not self._jobs:
            with self._drained:
                self._drained.notify_all()


# Shared by all replies, and never changed.
_NO_COPIES: frozenset[int] = frozenset()
_NONE: list[Any] = []
_NO_RESULT = Reply(Status.OK)


def _entry_hook(job: Job) -> UnpackHook:
    return lambda tensors: _enter(job, tensors)


def _enter(job: Job, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shows autograd the tensors of a request and returns those to use in their place."""
    job.execution = hooks.current().execute(job.request.meta, job.src, tensors)
    return job.execution.tensors
