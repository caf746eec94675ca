"""The remote references of one agent: counts, the values it owns, what others are owed.

``protocol.refs`` counts; this adds the lock, the values, and the hand-over between threads.
The agent's I/O thread calls ``received``, ``expect``, ``apply`` and ``peer_left``, which
are quick and run no user code: that is handed to ``submit``, as is the dropping of a value that
lost its last reference.

A user's reference is dropped by a finalizer, in whatever thread and at whatever moment:
that only appends to a deque and wakes the agent, which then sends what ``drain`` returns.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tensorplay.distributed.rpc.future import Future
from tensorplay.errors import NotInitializedError, RRefError, WorkerLostError
from tensorplay.protocol.calls import Op
from tensorplay.protocol.messages import PeerInfo
from tensorplay.protocol.refs import Adds, RefCounts, RefToken, Releases, RRefKey

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.rref import RRef

_log = logging.getLogger(__name__)

#: Objects among which the modules are counted for the status.
_MAX_COUNTED = 1000


class Host(Protocol):
    """What the references need of their agent."""

    incarnation: int
    rpc_timeout: float
    rrefs: RRefContext

    @property
    def info(self) -> PeerInfo:
        """This process."""

    def peer_by_incarnation(self, incarnation: int) -> PeerInfo | None:
        """Returns a live peer."""

    def call(
        self,
        peer: PeerInfo,
        function: Callable[..., Any] | None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = ...,
        hooks: bool = True,
        op: Op = Op.CALL,
        rref: RRefKey | None = None,
        subject: RRef[Any] | None = None,
    ) -> Future[Any]:
        """Sends a request."""

    def wake(self) -> None:
        """Has ``drain`` called soon; must not block."""


class Entry:
    """An object that this process owns, or will when the function that makes it has run.

    It lives as long as a local ``RRef`` or the counts of others do.

    Attributes:
        key: Name of the reference.
        future: The object, or the error of the function that was to make it.
    """

    __slots__ = ("_claimed", "called", "future", "key")

    def __init__(self, key: RRefKey) -> None:
        self.key = key
        self.future: Future[Any] = Future()
        self.future._retrieved = True  # the caller of the function is told of its error
        self.called = False
        self._claimed = False

    def claim(self) -> bool:
        """Returns whether the caller may complete the future: True once."""
        claimed, self._claimed = self._claimed, True
        return not claimed


class Hold:
    """A user's use of a reference; the use ends with this object.

    Attributes:
        key: Name of the reference.
        number: Tells this use from others.
        epoch: How often the context had let go of everything when it began.
    """

    __slots__ = ("_dropped", "epoch", "key", "number")

    def __init__(
        self, key: RRefKey, number: int, epoch: int, dropped: Callable[[RRefKey, int], None]
    ) -> None:
        self.key = key
        self.number = number
        self.epoch = epoch
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped(self.key, self.epoch)


class Exporter:
    """Counts the references that one message contains, while it is pickled.

    Args:
        context: The sender's references.
        dst: Incarnation of the receiver.
        kept: Whether this object is kept until the receiver has the message.

    Attributes:
        tokens: What the message's header is to list.
        rrefs: The references met.
    """

    def __init__(self, context: RRefContext, dst: int, *, kept: bool) -> None:
        self.context = context
        self.dst = dst
        self.kept = kept
        self.tokens: list[RefToken] = []
        self.rrefs: list[RRef[Any]] = []
        self._keys: set[RRefKey] = set()

    def add(self, rref: RRef[Any], key: RRefKey, owner: int, entry: Entry | None) -> None:
        """Counts a reference that is being pickled.

        Args:
            rref: The reference.
            key: Its name.
            owner: Incarnation of its owner.
            entry: Its object, if this process owns it.
        """
        self.rrefs.append(rref)
        if key not in self._keys:
            self._keys.add(key)
            self.tokens.append(self.context._export(self, key, owner, entry))

    def undo(self) -> None:
        """Takes the counts back: the message is not sent."""
        tokens, self.tokens = self.tokens, []
        self._keys.clear()
        self.rrefs.clear()
        self.context._unexport(tokens, self.dst)


class Importer:
    """Turns the references in a message into local ones, while it is unpickled.

    Args:
        context: The receiver's references.
        src: Incarnation of the sender.
    """

    def __init__(self, context: RRefContext, src: int) -> None:
        self.context = context
        self.src = src


class RRefContext:
    """The remote references of one agent. Safe to use from any thread.

    Args:
        agent: Sends and receives.
        submit: Runs a function in a thread where code of users may run.

    Attributes:
        closed: Whether the agent has ended.
        epoch: How often ``release_all`` was called; a ``Hold`` of another epoch is void.
    """

    def __init__(self, agent: Host, submit: Callable[..., object]) -> None:
        self.agent = agent
        self.closed = False
        self.epoch = 0
        self._submit = submit
        self._counts = RefCounts(agent.incarnation)
        self._entries: dict[RRefKey, Entry] = {}
        self._numbers = itertools.count()
        self._pending_users: set[RRefKey] = set()
        self._dropped: deque[tuple[RRefKey, int]] = deque()
        self._woken = False
        # Reentrant: a garbage collection inside may run a user's finalizer that comes here.
        self._lock = threading.RLock()

    # Making references.

    def own(self, value: Any) -> Entry:
        """Returns an entry for a local object; nothing is counted until it is sent."""
        entry = Entry(RRefKey(self.agent.incarnation, next(self._numbers)))
        entry.called = True
        entry.claim()
        entry.future.set_result(value)
        return entry

    def new_key(self) -> RRefKey:
        """Returns the name of a reference that another process is asked to fill."""
        return RRefKey(self.agent.incarnation, next(self._numbers))

    def hold(self, key: RRefKey, owner: int, *, new: bool = False) -> Hold:
        """Begins a use of another process's object.

        Args:
            key: Name of the reference.
            owner: Incarnation of its owner.
            new: Whether this process has just made it with ``new_key``.

        Raises:
            RRefError: If this process has not received the reference.
        """
        with self._lock:
            if new:
                self._counts.used.receive(key, owner)
            elif key in self._counts.used:
                self._counts.used.use(key)
            else:
                raise RRefError(
                    f"remote reference {key.creator}/{key.number} did not arrive in a message "
                    "of this agent: references cannot be restored from stored bytes"
                )
            return Hold(key, next(self._numbers), self.epoch, self._drop)

    def creating(self, key: RRefKey, future: Future[Any]) -> None:
        """Keeps account of references whose owner has not confirmed them yet."""
        self._pending_users.add(key)
        # torch's own method: this is no retrieval of the error that the future may get.
        torch.futures.Future.add_done_callback(future, lambda _: self._pending_users.discard(key))

    # The owner's side.

    def expect(self, key: RRefKey, user: int) -> Entry:
        """Enters an object that ``user`` has asked this process to make.

        It stays at least until ``fulfil`` or ``fail``. A second call changes nothing.
        """
        with self._lock:
            entry = self._entries.setdefault(key, Entry(key))
            if not entry.called:
                entry.called = True
                self._refresh(user)
                self._counts.expect(key, user)
            return entry

    def fulfil(self, key: RRefKey, value: Any) -> None:
        """Completes an expected object."""
        self._complete(key, lambda future: future.set_result(value))

    def fail(self, key: RRefKey, error: BaseException) -> None:
        """Completes an expected object with the error of the function that was to make it."""
        self._complete(key, lambda future: future.set_exception(error))

    def entry_future(self, key: RRefKey, src: int | None = None) -> Future[Any]:
        """Returns the future of an owned object, for a process that asks for it.

        Args:
            key: Name of the reference.
            src: Incarnation of the process that asks.

        Returns:
            A future that fails with ``RRefError`` if the object is not, or no longer, here.
        """
        entry = self.find(key, src)
        if isinstance(entry, Entry):
            return entry.future
        failed: Future[Any] = Future()
        failed._retrieved = True
        failed.set_exception(entry)
        return failed

    def apply(self, src: int, adds: Adds, releases: Releases) -> None:
        """Takes over the counts that another process reports."""
        with self._lock:
            for peer in {src, *(user for _, user, _ in adds)}:
                self._refresh(peer)
            self._free(self._counts.owned.apply(src, adds, releases))

    # Both sides.

    def exporter(self, dst: int, *, kept: bool = False) -> Exporter:
        """Returns what counts the references in a message that is about to be pickled.

        Args:
            dst: Incarnation of the receiver.
            kept: Whether the exporter is kept until the receiver is known to have the
                message, as a caller can until the reply; saves news to the owner.
        """
        return Exporter(self, dst, kept=kept)

    def importer(self, src: int) -> Importer:
        """Returns what restores the references in a message from ``src``."""
        return Importer(self, src)

    def received(self, tokens: Iterable[RefToken], src: int) -> None:
        """Counts the references of a message that has arrived, once a message."""
        if tokens:
            with self._lock:
                self._refresh(src)
                for token in tokens:
                    self._counts.receive(token, src)

    def settle(self, tokens: Iterable[RefToken]) -> None:
        """Ends the hold of ``received``: the message is unpickled, or never will be."""
        if tokens:
            with self._lock:
                self._free([token.key for token in tokens if self._counts.settle(token)])
                due = self._counts.used.due
            if due:
                self._wake()

    def peer_left(self, incarnation: int, name: str = "") -> None:
        """Forgets the counts of a process that is gone; ``name`` is for the log."""
        with self._lock:
            freed = self._counts.leave(incarnation)
            self._free(freed)
            orphans = [
                key
                for key, entry in self._entries.items()
                if not entry.called and key.creator == incarnation
            ]
            self._free(orphans)
        if freed:
            _log.info("freed %d objects that only peer %r, which is gone, used", len(freed), name)

    @property
    def due(self) -> bool:
        """Whether ``drain`` may return something; asks for no lock."""
        return bool(self._dropped) or not self._counts.used.settled

    def drain(self) -> list[tuple[int, Adds, Releases]]:
        """Returns the counts that are due to be sent now.

        Nothing that is pickled after this call may be sent before what it returns; two
        threads must not drain and send at once. For each entry that has ADDs,
        ``acknowledged`` is to be called when the owner has answered.

        Returns:
            Owner's incarnation, ADDs and RELEASEs, an entry for each owner.
        """
        self._woken = False
        with self._lock:
            while self._dropped:
                key, epoch = self._dropped.popleft()
                if epoch == self.epoch:
                    self._counts.used.drop(key)
            return self._counts.used.drain()

    def acknowledged(self, owner: int) -> None:
        """The owner has taken over an entry of ``drain`` that had ADDs."""
        with self._lock:
            self._counts.used.acknowledged(owner)
            due = self._counts.used.due
        if due:
            self._wake()

    def lookup(self, key: RRefKey) -> Entry:
        """Returns the entry of an owned object that a message refers to.

        Raises:
            RRefError: If the object is not, or no longer, here.
        """
        entry = self.find(key)
        if isinstance(entry, Entry):
            return entry
        raise entry

    def find(self, key: RRefKey, src: int | None = None) -> Entry | RRefError | WorkerLostError:
        """Returns the entry of an owned object, or why there is none.

        Args:
            key: Name of the reference.
            src: Incarnation of the process that asks.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None and self._counts.owned.may_come(key, src):
                # The request that creates it is larger than this one, and still coming.
                entry = self._entries[key] = Entry(key)
        return self._freed(key) if entry is None else entry

    def stats(self) -> dict[str, float]:
        """Returns how many objects this process owns for others and uses of others."""
        with self._lock:
            futures = [entry.future for entry in self._entries.values()]
        # Whoever owns this many objects has better things to do than to look at each.
        modules = sum(map(_is_module, futures)) if len(futures) <= _MAX_COUNTED else 0
        return {
            "rrefs_owned": len(self._counts.owned),
            "rrefs_used": len(self._counts.used),
            "modules": modules,
        }

    def debug_info(self) -> dict[str, str]:
        """Returns counts as text, under the names that ``torch.distributed.rpc`` uses."""
        with self._lock:
            pending = [entry for entry in self._entries.values() if not entry.future.done()]
            return {
                "num_owner_rrefs": str(len(self._counts.owned)),
                "num_forks": str(self._counts.owned.users()),
                "num_pending_futures": str(len(pending)),
                "num_pending_users": str(len(self._pending_users)),
                "num_user_rrefs": str(len(self._counts.used)),
            }

    def release_all(self) -> None:
        """Lets go of every reference to other processes' objects; they are void from now on."""
        with self._lock:
            self.epoch += 1
            self._dropped.clear()
            self._counts.used.drop_all()

    def close(self) -> None:
        """Ends the use of every reference; whoever still waits for an object is told so."""
        self.closed = True
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
            pending = [entry for entry in entries if entry.claim()]
        for entry in pending:
            entry.future.set_exception(
                NotInitializedError("RPC was shut down before the object was made")
            )

    # Inside.

    def _drop(self, key: RRefKey, epoch: int) -> None:
        # Called by finalizers: no lock, no I/O.
        if not self.closed:
            self._dropped.append((key, epoch))
            self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.agent.wake()

    def _export(
        self, exporter: Exporter, key: RRefKey, owner: int, entry: Entry | None
    ) -> RefToken:
        with self._lock:
            self._refresh(exporter.dst)
            token = self._counts.export(key, owner, exporter.dst, kept=exporter.kept)
            if entry is not None and key in self._counts.owned:
                self._entries[key] = entry
            return token

    def _unexport(self, tokens: Iterable[RefToken], dst: int) -> None:
        with self._lock:
            self._free([token.key for token in tokens if self._counts.unexport(token, dst)])

    def _complete(self, key: RRefKey, setter: Callable[[Future[Any]], None]) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.claim():
                return
        if entry is None:  # closed in the meantime
            return
        setter(entry.future)
        with self._lock:
            if self._counts.made(key):
                self._free([key])

    def _free(self, keys: Iterable[RRefKey]) -> None:
        """Lets go of owned objects; those that never came fail for whoever waits."""
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is None:
                continue
            if entry.called:
                self._submit(_drop, entry)
            elif entry.claim():
                self._submit(entry.future.set_exception, self._freed(key))

    def _freed(self, key: RRefKey) -> RRefError | WorkerLostError:
        creator = self.agent.peer_by_incarnation(key.creator)
        where = f"on worker {self.agent.info.name!r}"
        name = f"remote reference {key.creator}/{key.number}"
        if creator is None:
            return WorkerLostError(f"{name} is not {where}: the process that made it has left")
        return RRefError(
            f"{name}, made by {creator.name!r}, is not {where} any more: its last user had "
            "dropped it, or was thought dead; make a new one"
        )

    def _refresh(self, peer: int) -> None:
        """Takes note of a process that was thought dead and has come back."""
        if self._counts.is_departed(peer) and self.agent.peer_by_incarnation(peer) is not None:
            self._counts.join(peer)


def _is_module(future: Future[Any]) -> bool:
    try:
        return future.done() and isinstance(future.value(), torch.nn.Module)
    except Exception:  # the function that was to make it has raised
        return False


def _drop(entry: Entry) -> None:
    """Ends what may be the last use of a user's object."""
    del entry
