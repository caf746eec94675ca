"""``RRef``: a reference to an object that some process of the namespace owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import torch

from tensorplay.distributed.rpc import allow, current, hooks, pickler
from tensorplay.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from tensorplay.distributed.rpc.functions import async_execution
from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.options import WorkerInfo
from tensorplay.distributed.rpc.rref_context import Entry, Hold, Host, RRefContext
from tensorplay.errors import (
    NotInitializedError,
    OwnerLostError,
    RpcTimeoutError,
    RRefError,
    WorkerLostError,
)
from tensorplay.protocol.calls import Op
from tensorplay.protocol.messages import PeerInfo
from tensorplay.protocol.refs import RRefKey

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.rref_proxy import RRefProxy

__all__ = ["RRef"]

T = TypeVar("T")

#: What ``_serialize`` gives: creator, number, owner's incarnation, name and id.
Serialized = tuple[int, int, int, str, int]


class RRef(Generic[T]):
    """A reference to an object of type ``T`` that stays with its owner.

    ``rpc.remote`` makes one for a result that stays on the worker, ``RRef(value)`` one for
    an object of this process. It can be sent to any process of the namespace, alone or
    inside containers, modules and other objects. The owner keeps the object until the last
    reference to it has been dropped, or its holder has died.

    Args:
        value: The object that this process owns.
        type_hint: Accepted for scripts written for torch; not used.

    Attributes:
        autograd_edges: What autograd keeps of the call that made the reference.

    Raises:
        NotInitializedError: If this process has no agent.
    """

    autograd_edges: list[Any]
    _context: RRefContext
    _key: RRefKey
    _owner: int
    _worker: WorkerInfo
    _entry: Entry | None  # at the owner
    _hold: Hold | None  # at a user
    _created: Future[Any] | None  # at the user that called remote()
    _type: Future[type] | None
    _methods: set[str]  # that the object is known to have

    def __init__(self, value: T, type_hint: Any = None) -> None:
        context = current.agent().rrefs
        entry = context.own(value)
        me = context.agent.info
        self._bind(context, entry.key, me.incarnation, WorkerInfo(me.name, me.id), entry=entry)

    @classmethod
    def _create_remote(
        cls,
        agent: Host,
        owner: PeerInfo,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = UNSET_RPC_TIMEOUT,
    ) -> RRef[Any]:
        """Has ``owner`` run a function and keep the result; returns the reference to it."""
        context = agent.rrefs
        key = context.new_key()
        local = owner.incarnation == agent.incarnation
        entry = context.expect(key, owner.incarnation) if local else None
        try:
            created = agent.call(
                owner, function, args, kwargs, timeout=timeout, op=Op.REMOTE, rref=key
            )
        except BaseException as error:
            if local:
                context.fail(key, error)
            raise
        hold = None if local else context.hold(key, owner.incarnation, new=True)
        context.creating(key, created)
        rref: RRef[Any] = object.__new__(cls)
        rref._bind(
            context,
            key,
            owner.incarnation,
            WorkerInfo(owner.name, owner.id),
            entry=entry,
            hold=hold,
            created=created,
        )
        if getattr(created._recorded, "number", 0):
            rref.autograd_edges = [created._recorded]
        return rref

    @classmethod
    def _of_entry(cls, context: RRefContext, entry: Entry) -> RRef[Any]:
        """Returns a reference to an object of this process."""
        rref: RRef[Any] = object.__new__(cls)
        me = context.agent.info
        rref._bind(context, entry.key, me.incarnation, WorkerInfo(me.name, me.id), entry=entry)
        return rref

    def _bind(
        self,
        context: RRefContext,
        key: RRefKey,
        owner: int,
        worker: WorkerInfo,
        *,
        entry: Entry | None = None,
        hold: Hold | None = None,
        created: Future[Any] | None = None,
    ) -> None:
        self.autograd_edges = []
        self._context = context
        self._key = key
        self._owner = owner
        self._worker = worker
        self._entry = entry
        self._hold = hold
        self._created = created
        self._type = None
        self._methods = set()

    # Who owns it.

    def owner(self) -> WorkerInfo:
        """Returns name and id of the process that owns the object."""
        return self._worker

    def owner_name(self) -> str:
        """Returns the name of the process that owns the object."""
        return self._worker.name

    def is_owner(self) -> bool:
        """Returns whether this process owns the object."""
        return self._entry is not None

    def confirmed_by_owner(self) -> bool:
        """Returns whether the owner is known to have the object.

        False only between ``remote()`` and the owner's confirmation, and for good if the
        function failed.
        """
        if self._entry is not None or self._created is None:
            return True
        return self._created.done() and self._created.exception() is None

    # The object.

    def to_here(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> T:
        """Returns a copy of the object, or at its owner the object itself.

        Waits until the function that makes it has run.

        Args:
            timeout: Seconds, 0 or None for no limit; by default the agent's.

        Raises:
            OwnerLostError: If its owner is gone.
            RpcTimeoutError: If it does not come in time.
            NotInitializedError: If the agent has been shut down.
            Exception: Whatever the function that was to make it raised.
        """
        agent = self._context.agent
        if self._entry is not None:
            seconds = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
            return cast(T, self._entry.future.wait(seconds or None))
        owner = self._live_owner("to_here()")
        self._raise_failed_creation()
        try:
            fetched = agent.call(owner, None, (self,), timeout=timeout, op=Op.FETCH, rref=self._key)
            return cast(T, fetched.wait())
        except (RRefError, WorkerLostError):
            self._live_owner("to_here()")
            self._raise_failed_creation()
            raise

    def local_value(self) -> T:
        """Returns the object itself, at its owner.

        Raises:
            RRefError: If another process owns it.
            Exception: Whatever the function that was to make it raised.
        """
        return self._value_future().wait()

    def _value_future(self) -> Future[T]:
        """Returns the future of the object, at its owner."""
        if self._entry is None:
            raise RRefError(
                f"Cannot call localValue() on a non-local reference {self!r}. Call it on "
                f"{self.owner_name()}, or use to_here()"
            )
        return self._entry.future

    # Calls on the object.

    def rpc_sync(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Returns a proxy: ``rref.rpc_sync().method(...)`` runs the method at the owner.

        Args:
            timeout: Seconds for each call, 0 or None for no limit; by default the agent's.
        """
        from tensorplay.distributed.rpc import rref_proxy

        return rref_proxy.RRefProxy(self, rref_proxy.call_sync, timeout)

    def rpc_async(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Returns a proxy as ``rpc_sync`` does, whose calls return futures."""
        from tensorplay.distributed.rpc import rref_proxy

        return rref_proxy.RRefProxy(self, rref_proxy.call_async, timeout)

    def remote(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Returns a proxy as ``rpc_sync`` does, whose calls return references."""
        from tensorplay.distributed.rpc import rref_proxy

        return rref_proxy.RRefProxy(self, rref_proxy.call_remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass from the object, a scalar tensor.

        Args:
            dist_autograd_ctx_id: The distributed autograd context that collects the
                gradients. Without one they go to ``.grad``, at the owner only.
            retain_graph: Whether the graph can be used again.

        Raises:
            RRefError: If the object is no tensor, or a user gives no context.
            RuntimeError: Whatever autograd objects to.
        """
        if self._entry is not None:
            _backward(self, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RRefError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: "
                f"{self.owner_name()} owns the tensor"
            )
        arguments = (self, dist_autograd_ctx_id, retain_graph)
        owner = self._live_owner("backward()")
        self._context.agent.call(owner, _backward, arguments, timeout=0, hooks=False).wait()

    def _get_type(
        self, timeout: float | None = UNSET_RPC_TIMEOUT, blocking: bool = True
    ) -> type[T] | Future[type[T]]:
        """Returns the type of the object, or the future of it; the owner is asked once."""
        known = self._type
        if known is None or (known.done() and known.exception() is not None):
            if self._entry is not None:
                known = self._entry.future._then(_type_of)
            else:
                owner = self._live_owner("_get_type()")
                known = self._context.agent.call(
                    owner, _get_type, (self,), timeout=timeout, hooks=False
                )
            self._type = known
        return known.wait() if blocking else known

    def _get_future(self) -> Future[Any]:
        """Returns the future of the object's creation."""
        if self._created is not None:
            return self._created
        if self._entry is not None:
            return self._entry.future
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    # Sending.

    def _serialize(self) -> Serialized:
        """Returns what ``_deserialize`` takes in the receiving process; counts the reference.

        Raises:
            RRefError: Outside the pickling of a call.
        """
        if self._hold is not None and self._is_void():
            raise NotInitializedError(
                f"RPC was shut down since {self!r} was made. "
                "Cannot call fork an UserRRef after deletion."
            )
        exporter = pickler.current_exporter()
        if exporter is None:
            _refuse_pickling()
        if exporter.context is not self._context:
            raise NotInitializedError(
                f"{self!r} belongs to an agent that was shut down, and cannot be sent by "
                "the one that was started since"
            )
        exporter.add(self, self._key, self._owner, self._entry)
        worker = self._worker
        return (self._key.creator, self._key.number, self._owner, worker.name, worker.id)

    @staticmethod
    @allow.wire_safe(builds=True, calls=False)
    def _deserialize(serialized: Serialized) -> RRef[Any]:
        """Returns the reference that ``_serialize`` described, in the receiving process.

        Raises:
            RRefError: Outside the unpickling of a call, or if the object is gone.
        """
        importer = pickler.current_importer()
        if importer is None:
            _refuse_pickling()
        creator, number, owner, name, id = serialized
        context: RRefContext = importer.context
        key = RRefKey(creator, number)
        rref: RRef[Any] = object.__new__(RRef)
        local = owner == context.agent.incarnation
        rref._bind(
            context,
            key,
            owner,
            WorkerInfo(name, id),
            entry=context.lookup(key) if local else None,
            hold=None if local else context.hold(key, owner),
        )
        return rref

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_pickling()

    def __repr__(self) -> str:
        context = self._context
        creator = context.agent.peer_by_incarnation(self._key.creator)
        made_on = self._key.creator if creator is None else creator.id
        key = f"GloballyUniqueId(created_on={made_on}, local_id={self._key.number})"
        if self._hold is None:
            return f"OwnerRRef({key})"
        here = context.agent.info.id
        use = f"GloballyUniqueId(created_on={here}, local_id={self._hold.number})"
        return f"UserRRef(RRefId = {key}, ForkId = {use})"

    def _is_void(self) -> bool:
        context = self._context
        return context.closed or (self._hold is not None and self._hold.epoch != context.epoch)

    def _is_lost(self) -> bool:
        """Returns whether the object is gone with its owner."""
        if self._entry is not None or self._is_void():
            return False
        return self._context.agent.peer_by_incarnation(self._owner) is None

    def _live_owner(self, what: str) -> PeerInfo:
        """Returns the owner, or raises why it cannot be asked."""
        if self._is_void():
            raise NotInitializedError(
                f"RPC was shut down since {self!r} was made. "
                f"Cannot call {what} on it after deletion."
            )
        owner = self._context.agent.peer_by_incarnation(self._owner)
        if self._created is not None:
            self._created._retrieved = True  # whatever uses the reference raises its error
        if owner is None:
            raise OwnerLostError(
                f"worker {self._worker.name!r} (id {self._worker.id}), which owned {self!r}, is "
                f"gone, and the object with it: {what} is not possible any more"
            )
        return owner

    def _raise_failed_creation(self) -> None:
        if self._created is None or not self._created.done():
            return
        error = self._created.exception()
        if isinstance(error, RpcTimeoutError):
            raise RpcTimeoutError(
                f"RRef creation via rpc.remote() on {self.owner_name()!r} timed out, so "
                f"whether the object is there is not known: {error}"
            ) from error
        if error is not None:
            self._created.wait()  # raises it


def _type_of(done: torch.futures.Future[Any]) -> type:
    return type(done.value())


@allow.wire_safe()
@async_execution
def _get_type(rref: RRef[Any]) -> Future[type]:
    return rref._value_future()._then(_type_of)


@allow.wire_safe()
def _backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RRefError(
            f"RRef should contain a tensor for .backward(), not a {type(value).__qualname__}"
        )
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    hooks.current().backward(context_id, [value], retain_graph)


def _refuse_pickling() -> NoReturn:
    raise RRefError(
        "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
        "send it as an argument or a result of a call"
    )


def _reduce(rref: RRef[Any]) -> tuple[Any, ...]:
    return RRef._deserialize, (rref._serialize(),)


pickler.register_reducer(RRef, _reduce)
