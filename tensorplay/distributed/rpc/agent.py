"""The agent: what makes a process a peer, able to call and to be called.

Worker and client run the same agent.  Its parts:

    link      the connection to the broker, and the one thread that owns it
    inbound   requests and replies as they come in, put together from chunks
    caller    sends requests and completes their futures
    callee    runs the requests of others on ``executor`` and answers them
    rrefs     the remote references that this process holds or owns

The link's thread never runs a user's code: replies that nobody waits for are decoded by
a pool of the caller's.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tensorplay.address import BrokerAddress
from tensorplay.distributed.rpc import about, current, hooks, payload, recycling, tracing
from tensorplay.distributed.rpc.callee import Callee
from tensorplay.distributed.rpc.caller import Caller
from tensorplay.distributed.rpc.collective import Collectives
from tensorplay.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from tensorplay.distributed.rpc.executor import Executor, Relief, blocked
from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.handshakes import Handshakes
from tensorplay.distributed.rpc.inbound import Frame, Inbound, Message, too_large
from tensorplay.distributed.rpc.link import Link
from tensorplay.distributed.rpc.meters import Meters
from tensorplay.distributed.rpc.options import BrokerRpcBackendOptions, WorkerInfo, checked_timeout
from tensorplay.distributed.rpc.orders import Orders
from tensorplay.distributed.rpc.roster import PeerRoster
from tensorplay.distributed.rpc.rref_context import RRefContext
from tensorplay.distributed.rpc.rules import Rules
from tensorplay.distributed.rpc.shm import SharedMemory
from tensorplay.errors import (
    BrokerError,
    NotInitializedError,
    ProtocolError,
    RegistrationError,
    RpcTimeoutError,
)
from tensorplay.protocol import wire
from tensorplay.protocol.calls import Op, Reply, Request
from tensorplay.protocol.messages import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Departure,
    Kind,
    PeerInfo,
    Refused,
    Role,
    Route,
    Undeliverable,
    Welcome,
)
from tensorplay.protocol.refs import RRefKey
from tensorplay.protocol.session import PeersChanged

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.rref import RRef

_log = logging.getLogger(__name__)

#: Seconds between two looks for memory that lies idle.
TRIM_SECONDS = 2.0
#: Seconds that one who leaves gives others to map the memory that holds its last results.
READ_SECONDS = 2.0


def late(peer: PeerInfo) -> Future[Any]:
    """Returns the future of a call whose time was up before it could be sent."""
    future: Future[Any] = Future()
    future.set_exception(
        RpcTimeoutError(
            f"RPC ran for more than set timeout before it was sent: {peer.name!r} has not "
            "consumed what it was sent before (window_bytes of BrokerRpcBackendOptions)"
        )
    )
    return future


def _ended() -> NotInitializedError:
    return NotInitializedError("the agent was shut down while the call was in flight")


class Agent:
    """Connects this process to a broker and lets it call and be called.

    Args:
        name: Name to register.
        address: Where the broker is.
        role: WORKER or CLIENT.
        rank: Rank to ask for, or -1.
        world_size: Size of the fixed world, or None for an elastic one.
        options: Threads, time-outs, devices.
        device: Default device of what is placed here, as others see it.
    """

    _link: Link
    _caller: Caller

    def __init__(
        self,
        name: str,
        address: BrokerAddress,
        *,
        role: Role,
        rank: int = -1,
        world_size: int | None = None,
        options: BrokerRpcBackendOptions,
        device: str = "cpu",
    ) -> None:
        self.options = options
        self.address = address
        self.world_size = world_size
        self.pid = os.getpid()
        self.incarnation = secrets.randbits(63) | 1
        self.roster = PeerRoster(world_size or 0)
        self.executor = Executor(options.num_worker_threads, f"tensorplay-{name}")
        self.collectives = Collectives()
        self.meters = Meters()
        self.orders = Orders(lambda message: self._link.tell(message), self.meters)
        self.orders.on("kill", self._killed)
        self.on_asked, self.on_answered = self.orders.asked, self.orders.answered
        self._registered = threading.Event()
        self.failure: BrokerError | None = None
        self._end_callbacks: list[Callable[[], None]] = []
        self._closing = False
        self._closed = False
        self._departure_callbacks: list[Callable[[Departure], None]] = []
        self._next_trim = 0.0
        self.rrefs = RRefContext(self, self.executor.submit)
        self.shared = SharedMemory(
            self.incarnation,
            options.shm_limit,
            lambda *offer: self._caller.probe(*offer),
            lambda incarnation: self.roster.get(incarnation) is not None,
            enabled=options.shm,
        )
        self.rules = Rules(self.roster, options.allow, options.allow_replies)
        self._caller = Caller(
            self.incarnation,
            name,
            options,
            self.roster,
            self.rrefs,
            self._dispatch,
            lambda action: self._link.post(action),
            self._send_cancel,
            self.shared.leases_for,
            self.meters,
            self.rules,
        )
        self._relief = Relief(self.executor, self._caller.completions)
        hello = about.hello(
            name, address.namespace, self.incarnation, role, rank, world_size or 0, device
        )
        self._handshakes = Handshakes(str(address), options.keys(name))
        self._link = Link(address, hello, self, options.window_bytes, self._handshakes)
        self._inbound = Inbound(payload.allocate, self._link.consumed, options.window_bytes)
        self._max_bytes: int | None = None

    # Life.

    def start(self) -> None:
        """Connects and registers.

        Raises:
            RegistrationError: If the broker refuses this peer.
            BrokerError: If it does not answer within the options' ``connect_timeout``.
        """
        tracing.find_telemetry()
        self._link.start()
        if not self._registered.wait(self.options.connect_timeout):
            self.abandon()
            raise BrokerError(
                f"no answer from a broker at {self.address} ({', '.join(self.address.resolve())}) "
                f"within {self.options.connect_timeout} s; is `python -m tensorplay.broker` "
                f"running there, is the address reachable from this host?{self._handshakes.why()}"
            )
        if self.failure is not None:
            self.abandon()
            raise self.failure

    def drain(self, timeout: float | None) -> bool:
        """Waits until own calls are answered and those of others are done.

        Args:
            timeout: Seconds to wait at most; None is no limit.

        Returns:
            Whether that came about.
        """
        if not self._registered.is_set():
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        done = self._caller.wait_idle(timeout)
        rest = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self._callee.wait_idle(rest) and done

    def close(self, timeout: float = 5.0, reason: str = "left") -> None:
        """Leaves the broker and ends every thread; calls still in flight fail."""
        if self._closing:
            return
        self._closing = True
        self.flush_refs()
        if self._registered.is_set() and self.failure is None:
            self._callee.leave()
        # What still runs here may call others until nothing can be sent any more.
        self._link.close(timeout, reason)
        self._closed = True
        self.shared.wait_read(min(timeout, READ_SECONDS))
        self._end()

    def abandon(self) -> None:
        """Ends every thread without a goodbye."""
        self._closing = self._closed = True
        self._link.abandon()
        self._end()

    def _end(self) -> None:
        self._caller.fail_all(_ended())
        self.rrefs.close()
        self.shared.close()
        self.executor.close()
        self._caller.completions.close()

    # Who is there.

    @property
    def info(self) -> PeerInfo:
        """This peer as the broker registered it."""
        return self.roster.me

    def peer(self, target: str | int | WorkerInfo | PeerInfo) -> PeerInfo:
        """Returns the live peer of that name, rank or WorkerInfo.

        Raises:
            WorkerNotFoundError: If there is none; the text lists who is there.
        """
        return self.roster.find(target)

    def callee(self, target: str | int | WorkerInfo) -> PeerInfo:
        """Returns the peer of that name, rank or WorkerInfo, be it one that has left.

        A call to one that has left fails with ``WorkerLostError``.

        Raises:
            WorkerNotFoundError: If there never was one, as far as this process knows.
        """
        return self.roster.find(target, departed=True)

    def peer_by_incarnation(self, incarnation: int) -> PeerInfo | None:
        """Returns the live peer of that incarnation."""
        return self.roster.get(incarnation)

    def get_worker_info(self, target: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Returns name and id of a peer, by default of this one."""
        peer = self.info if target is None else self.peer(target)
        return WorkerInfo(peer.name, peer.id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Returns name and id of every live peer of the namespace, by id."""
        return [WorkerInfo(peer.name, peer.id) for peer in self.roster.all()]

    def on_peer_left(self, callback: Callable[[Departure], None]) -> None:
        """Has ``callback`` run, in a thread that it must not block, when a peer goes."""
        self._departure_callbacks.append(callback)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` run when the registration is lost for good; see ``failure``."""
        self._end_callbacks.append(callback)

    def get_debug_info(self) -> dict[str, str]:
        """Returns counts of what is going on, as text."""
        return {f"agent.{name}": str(int(value)) for name, value in self.stats().items()}

    def world(self) -> list[str]:
        """Returns the names of a fixed world's members, or of all who are here."""
        return [
            peer.name
            for peer in self.roster.all()
            if self.world_size is None or 0 <= peer.id < self.world_size
        ]

    def _get_device_map(self, worker: WorkerInfo) -> dict[torch.device, torch.device]:
        return dict(self.options.device_maps.get(worker.name, {}))

    def progress(self, peer: int, id: int) -> tuple[int, int]:
        """Returns how many bytes of a large request or its reply have passed, and of how many."""
        received, size = self._inbound.progress(peer, id)
        return (received, size) if size else self._link.progress(peer, id)

    # Calling.

    @property
    def rpc_timeout(self) -> float:
        """Seconds until an unanswered call fails by default; 0 is no limit."""
        return self._caller.rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self._caller.rpc_timeout = seconds

    def call(
        self,
        peer: PeerInfo,
        function: Callable[..., Any] | None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = UNSET_RPC_TIMEOUT,
        hooks: bool = True,
        op: Op = Op.CALL,
        rref: RRefKey | None = None,
        subject: RRef[Any] | None = None,
    ) -> Future[Any]:
        """Sends a request and returns the future of its result.

        Args:
            peer: The callee.
            function: What it runs; None for FETCH.
            args: Its positional arguments; for FETCH the reference itself.
            kwargs: Its keyword arguments.
            timeout: Seconds, 0 or None for no limit; the agent's default if not given.
            hooks: Whether autograd takes notice.
            op: The operation.
            rref: The reference that REMOTE fills and FETCH reads.
            subject: A reference to an object of the callee, for CALL: comes before ``args``.

        Raises:
            NotInitializedError: If the agent is closed or belongs to the parent process.
            SerializationError: If an argument cannot travel; nothing is sent then.
            MessageTooLargeError: If the payload exceeds the broker's limit.
            ConfigError: If the time-out is negative.

        A caller that is ahead of the callee by the options' ``window_bytes`` waits until the
        callee has consumed some of them.
        """
        self._check_usable()
        timeout = checked_timeout(timeout)
        if peer.incarnation != self.incarnation and self._link.full(peer.incarnation):
            left = self._wait_for_room(peer, timeout)
            if left is None:
                return late(peer)
            timeout = left
        future = self._caller.call(peer, function, args, kwargs, timeout, hooks, op, rref, subject)
        if self.roster.get(peer.incarnation) is None:  # it left before the call was entered
            self._caller.lose(peer, self.roster.departure(peer))
            self._link.drop(peer.incarnation)  # nobody else would
        if self._closed or self.failure is not None:  # since the check above
            self._caller.fail_all(self.failure or _ended())
        return future

    def _wait_for_room(self, peer: PeerInfo, timeout: float) -> float | None:
        """Waits until a slow peer has consumed something.

        Returns:
            What is left of the time-out; None if it has passed.
        """
        seconds = self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        started = time.monotonic()
        with blocked():
            self._link.wait_for_room(peer.incarnation, seconds or None)
        self._check_usable()
        if not seconds:
            return seconds
        left = seconds - (time.monotonic() - started)
        return left if left > 0 else None

    def flush_refs(self) -> None:
        """Sends the reference counts that are due, before whatever is sent next."""
        self._caller.flush_refs()

    def wake(self) -> None:
        """Has what is due sent soon; never blocks."""
        self._link.wake()

    def _check_usable(self) -> None:
        if not current.is_of_this_process(self):
            raise NotInitializedError(
                "this process was forked from one that had called init_rpc; an agent cannot be "
                "shared between processes: call init_rpc in this process"
            )
        if self._closed:
            raise NotInitializedError("RPC has been shut down: call init_rpc first")
        if self.failure is not None:
            raise type(self.failure)(f"this process is not registered any more: {self.failure}")

    def _dispatch(
        self, kind: Kind, dst: int, id: int, header: Request | Reply, frames: Sequence[Frame]
    ) -> bool:
        """Sends a request or reply; returns whether it goes in one message, not in chunks."""
        size = sum(map(len, frames)) if frames else 0
        if self._max_bytes is not None and size > self._max_bytes:
            raise too_large("request" if kind == Kind.REQUEST else "result", size, self._max_bytes)
        if dst == self.incarnation:
            self._complete_message(Message(Route(kind, dst, dst, id, size), header, frames))
            return True
        if whole := size <= CHUNK_BYTES:
            if header.blocks:  # they do not travel, but take their part of the window
                size += sum(block.nbytes for block in header.blocks)
            self._link.send(dst, kind, id, size, wire.encode(header), *frames)
        else:
            header = msgspec.structs.replace(header, sizes=[len(frame) for frame in frames])
            payload = [memoryview(frame) for frame in frames]
            self._link.send_stream(dst, kind, id, size, wire.encode(header), payload)
        if kind == Kind.REPLY and not self.executor.backlog:
            self._link.pump()
        else:
            self._link.wake()
        return whole

    def _reply(self, dst: int, id: int, header: Reply, frames: Sequence[Frame]) -> None:
        # Counts first: whoever is told of a reference by the reply must be known by then.
        self._caller.flush_refs()
        self._dispatch(Kind.REPLY, dst, id, header, frames)

    def _send_cancel(self, peer: PeerInfo, id: int) -> None:
        if peer.incarnation == self.incarnation:
            self._callee.cancel(self.incarnation, id)
        else:
            # Goes behind the request: it must not arrive first.
            self._link.send(peer.incarnation, Kind.CANCEL, id, 0)
            self._link.wake()

    # What the link tells; all in its thread.

    def on_registered(self, welcome: Welcome, again: bool) -> None:
        """The broker has registered this peer."""
        self.roster.update_self(welcome.peer)
        self._max_bytes = self._inbound.max_bytes = welcome.max_message_bytes
        for warning in welcome.warnings:
            _log.warning("%s", warning)
        if not again:
            self._callee = Callee(
                welcome.peer,
                self.rrefs,
                self.executor,
                self._reply,
                self._link.consumed,
                self.shared,
                self.meters,
                self.rules,
            )
        self._registered.set()

    def on_rejected(self, refused: Refused) -> None:
        """The broker has refused this peer."""
        self._end_with(RegistrationError(refused.text))

    def on_failed(self, error: BaseException) -> None:
        """The link has ended by an error of the library's own."""
        self._end_with(
            BrokerError(
                f"the connection to the broker failed, {type(error).__name__}: {error}; call "
                "shutdown and init_rpc to join again (the log has the traceback: please report it)"
            )
        )

    def _end_with(self, failure: BrokerError) -> None:
        """Fails all calls, those to come as well."""
        self.failure = failure
        if self._registered.is_set():
            self._caller.fail_all(self.failure)
        self._registered.set()
        for callback in self._end_callbacks:
            callback()

    def on_peers(self, changed: PeersChanged) -> None:
        """Peers have come, gone, or been refused."""
        self.roster.change(changed.joined, changed.left, changed.refused)
        for gone in changed.left:
            self._link.drop(gone.peer.incarnation)
            self._lose(gone)

    def on_forgotten(self, incarnation: int) -> None:
        """A peer had given up this process, which is back: neither owes the other anything."""
        peer = self.roster.get(incarnation)
        if peer is not None:
            reason = "it had given up this process, which was out of its reach"
            self._lose(Departure(peer, clean=False, reason=reason))

    def _killed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """An operator ends the registration; workers end their process instead."""
        self.on_rejected(
            Refused(PROTOCOL_VERSION, "killed", "an operator has ended this peer's registration")
        )
        self._link.stop()
        return {}

    def on_broker_lost(self, silent_for: float) -> None:
        """The broker is silent."""
        _log.warning("the broker at %s is silent for %.1f s", self.address, silent_for)

    def on_undeliverable(self, report: Undeliverable) -> None:
        """A message of this process reached nobody."""
        if report.code == "gone":
            self._caller.lose_unknown(report.dst, report.text)
        # The id is of a call of ours, or, in a reply or a chunk of one, of a call of theirs.
        elif report.kind in (Kind.REQUEST, Kind.CHUNK) and self._caller.undeliverable(report):
            return
        elif report.kind in (Kind.REPLY, Kind.CHUNK):
            self._callee.reply_lost(report.dst, report.id, report.text)

    def on_message(self, route: Route, frames: Sequence[Frame]) -> None:
        """A routed message has come."""
        if route.kind == Kind.CANCEL:
            self._cancelled(route)
            return
        try:
            message = self._inbound.feed(route, frames)
        except MemoryError as error:
            if route.kind == Kind.REQUEST:
                self._callee.refuse(route.src, route.id, error)
            raise ProtocolError(str(error)) from error
        if message is not None:
            self._complete_message(message)

    def on_tick(self, now: float) -> float:
        """Fails calls that have run out of time; keeps the pools and counts going."""
        wanted = min(self._caller.expire(now), self.orders.tell_errors(now))
        self._caller.flush_refs()
        hooks.current().flush()
        if now >= self._next_trim:
            self._next_trim = now + TRIM_SECONDS
            self.shared.trim(now)
            recycling.trim(now)
        return min(wanted, self._relief.tick(now))

    def stats(self) -> dict[str, float]:
        """Returns the counts that the broker's status shows of this peer."""
        callee = self._callee if self._registered.is_set() else None
        return {
            "calls_in_flight": len(self._caller),
            "requests_in_progress": 0 if callee is None else len(callee),
            "requests_unwanted": 0 if callee is None else callee.unwanted(),
            "requests_queued": self.executor.backlog,
            "threads": self.executor.size,
            "violations": self.rules.violations,
            **self.rrefs.stats(),
            **self.shared.stats(),
            **hooks.current().stats(),
            **self.meters.stats(),
        }

    def _complete_message(self, message: Message) -> None:
        src = self.roster.get(message.route.src)
        if src is None:
            raise ProtocolError("its sender is not on the roster")
        if message.header.blocks:
            message.frames = self.shared.mappings.attach(src, message.header.blocks, message.frames)
        if isinstance(message.header, Request):
            self._callee.accept(message, src)
            return
        self._link.consumed(src.incarnation, message.credit)
        self._caller.complete(message, src)

    def _cancelled(self, route: Route) -> None:
        partial = self._inbound.cancel(route.src, route.id)
        if partial is None:
            self._callee.cancel(route.src, route.id)
        else:  # its references have come, though it never will
            src = self.roster.get(route.src)
            if src is not None:
                self.shared.mappings.discard(src, partial.header.blocks)
            self.rrefs.received(partial.header.refs, route.src)
            self.rrefs.settle(partial.header.refs)

    def _lose(self, gone: Departure) -> None:
        """Fails what is in flight to a peer that is gone, and forgets what is its."""
        peer = gone.peer
        self._caller.lose(peer, gone.reason)
        self._inbound.drop(peer.incarnation)
        self.shared.drop(peer.incarnation)
        self._callee.peer_left(peer.incarnation)
        self.rrefs.peer_left(peer.incarnation, peer.name)
        self.collectives.peer_left(self.info.name, peer.name)
        for callback in self._departure_callbacks:
            callback(gone)
