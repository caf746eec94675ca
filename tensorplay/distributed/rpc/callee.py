"""The callee's side: runs what others ask for and answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorplay.distributed.rpc import allow, hooks, internal, payload, remote_exception, shm
from tensorplay.distributed.rpc.executor import Executor
from tensorplay.distributed.rpc.inbound import Frame, Message
from tensorplay.distributed.rpc.meters import Meters
from tensorplay.distributed.rpc.rref_context import RRefContext
from tensorplay.distributed.rpc.rules import Rules
from tensorplay.distributed.rpc.shm import SharedMemory
from tensorplay.errors import AsyncResultError, BrokerError, ProtocolError, RpcTimeoutError
from tensorplay.protocol.calls import Op, Reply, Request, Status, decode_changes
from tensorplay.protocol.messages import Kind, PeerInfo, Route

_log = logging.getLogger(__name__)

#: Marks functions whose result is a future of the result.
ASYNC_EXECUTION_MARK = "_wrapped_async_rpc_function"


@dataclass
class Job:
    """A request that has not been answered.

    Attributes:
        message: The request.
        src: Who asks.
        began: When it has come, by this process's clock.
        expires: When the caller stops waiting, by the same clock.
        taken: Whether a thread of the pool has taken it. Set before it looks at ``cancelled``,
            while that is set before ``taken`` is looked at: one of the two sees the other.
        cancelled: Whether the caller has said that it does not want the result.
        execution: What autograd keeps of the call while it runs.
    """

    message: Message
    src: PeerInfo
    began: float
    expires: float
    taken: bool = False
    cancelled: bool = False
    execution: hooks.Execution | None = None

    @property
    def request(self) -> Request:
        """The request's header."""
        assert isinstance(self.message.header, Request)
        return self.message.header

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
        reply: Sends a reply: route, header, payload frames.
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
        reply: Callable[[Route, Reply, Sequence[Frame]], None],
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
        self._jobs: dict[tuple[int, int], Job] = {}
        self._drained = threading.Condition()
        self._leaving = False

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
        job = Job(message, src, now, now + request.timeout if request.timeout else float("inf"))
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
        self._executor.submit(self._run, job)

    def _of_this_library(self, job: Job) -> list[Frame]:
        """Does what a request asks for that runs no user code; returns the reply's payload."""
        frame = job.message.frames[0] if job.message.frames else b""
        if job.request.op is Op.PROBE:
            return [self._shared.answer(job.src, frame)]
        changes = decode_changes(frame)
        self._rrefs.apply(job.src.incarnation, changes.adds, changes.releases)
        return []

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
        error = BrokerError(f"the reply could not be delivered: {why}")
        failure = remote_exception.describe(error, self._me.name, self._me.id)
        route = Route(Kind.REPLY, src, self._me.incarnation, id)
        self._send_reply(route, Reply(Status.ERROR), [remote_exception.encode(failure)])

    def peer_left(self, incarnation: int) -> None:
        """Cancels the requests of a peer that is gone."""
        for job in list(self._jobs.values()):
            if job.src.incarnation == incarnation:
                self._give_up(job)

    def wait_idle(self, timeout: float | None) -> bool:
        """Waits until no request is being worked on; returns whether that came about."""
        with self._drained:
            return self._drained.wait_for(lambda: not self._jobs, timeout)

    def _run(self, job: Job) -> None:
        job.taken = True
        if job.cancelled or time.monotonic() > job.expires:
            self._drop(job)
            return
        guard = self._rules.of_request(job.src)
        if guard is None:
            self._execute(job)
        else:
            with allow.guarding(guard):
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

    def _unpack(self, job: Job) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        request = job.request

        try:
            function, args, kwargs = payload.unpack(
                job.message.frames,
                importer=self._rrefs.importer(job.src.incarnation),
                tensors_hook=(lambda tensors: _enter(job, tensors)) if request.meta else None,
                custom=internal.custom_pickler(),
            )
            return function, args, kwargs
        finally:
            self._release(job)

    def _release(self, job: Job) -> None:
        """Lets go of the request's payload: it is unpacked, or never will be."""
        job.message.frames = ()
        self._rrefs.settle(job.request.refs)
        self._consumed(job.src.incarnation, job.message.credit)

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
        if job.cancelled and request.op is not Op.REMOTE:
            self._discard(job)
            return
        if request.op is Op.REMOTE:
            assert request.rref is not None
            self._rrefs.fulfil(request.rref, result)
            self._answer(job, Reply(Status.OK), [])
            return
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
                device_map=payload.device_map(request.devices),
                tensors_hook=leave,
                custom=internal.custom_pickler(),
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
        _log.warning("call %d of %r raised", job.message.route.id, job.src.name, exc_info=error)
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
        with self._drained:
            if self._jobs.get(job.key) is not job:  # another thread was quicker
                return
            del self._jobs[job.key]
            self._meters.dropped += 1
            if not self._jobs:
                self._drained.notify_all()
        self._release(job)
        if job.request.op is Op.REMOTE:
            self._fail(job, RpcTimeoutError("the caller stopped waiting before the call began"))

    def _discard(self, job: Job) -> None:
        """Drops the result of a request whose caller has stopped waiting meanwhile."""
        if job.execution is not None:
            job.execution.failed()
            job.execution = None
        with self._drained:
            self._meters.discarded += 1
        self._done(job)

    def _answer(self, job: Job, reply: Reply, frames: Sequence[Frame]) -> None:
        route = Route(Kind.REPLY, job.src.incarnation, self._me.incarnation, job.message.route.id)
        self._send_reply(route, reply, frames)
        job.execution = None
        self._done(job)

    def _done(self, job: Job) -> None:
        with self._drained:
            self._meters.served.add(time.monotonic() - job.began)
            self._jobs.pop(job.key, None)
            if not self._jobs:
                self._drained.notify_all()


def _enter(job: Job, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shows autograd the tensors of a request and returns those to use in their place."""
    job.execution = hooks.current().execute(job.request.meta, job.src, tensors)
    return job.execution.tensors
