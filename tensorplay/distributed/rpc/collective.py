"""Gathering from and waiting for a set of peers, over calls."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tensorplay.distributed.rpc import allow, current
from tensorplay.distributed.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from tensorplay.errors import RpcTimeoutError, WorkerLostError, WorkerNotFoundError

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.agent import Agent


#: The members of a gathering, and its number among those of the same members.
_Key: TypeAlias = tuple[tuple[str, ...], int]


@dataclass
class _Round:
    """One gathering, on one member."""

    objects: dict[str, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)
    lost: str = ""


class Collectives:
    """The gatherings of one agent: which round comes next, and those under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[tuple[str, ...], int] = {}
        self._rounds: dict[_Key, _Round] = {}

    def begin(self, members: tuple[str, ...]) -> tuple[_Key, _Round]:
        """Starts this member's next round with ``members``."""
        with self._lock:
            number = self._next.get(members, 0)
            self._next[members] = number + 1
            key = (members, number)
            return key, self._rounds.setdefault(key, _Round())

    def get(self, key: _Key) -> _Round:
        """Returns a round that another member may have started before this one."""
        with self._lock:
            return self._rounds.setdefault(key, _Round())

    def end(self, key: _Key) -> None:
        """Forgets a round."""
        with self._lock:
            self._rounds.pop(key, None)

    def peer_left(self, me: str, name: str) -> None:
        """Fails the rounds that cannot be completed without a peer which is gone.

        The leader misses a member that has given nothing yet. A follower misses only the
        leader: another follower may have what it needs, and leave before this one has.
        """
        with self._lock:
            for (members, _), round_ in self._rounds.items():
                needed = name == members[0] or (
                    me == members[0] and name in members and name not in round_.objects
                )
                if needed and not round_.complete.is_set():
                    round_.lost = name
                    round_.complete.set()


def all_gather(
    agent: Agent,
    obj: Any,
    names: Iterable[str] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Any]:
    """Returns what each member gave, by name, once all have called this.

    The member whose name sorts first leads: the others send it their objects, and it sends
    all of them back.

    Args:
        agent: This member.
        obj: What this member gives.
        names: The members; by default all peers of a fixed world.
        timeout: Seconds for each message; not given, the agent's for messages and no limit
            for the others to come; 0 is no limit at all.

    Raises:
        RpcTimeoutError: If a member did not answer in time.
        WorkerLostError: If a member has gone.
    """
    members = tuple(sorted(set(names) if names else agent.world()))
    name, leader = agent.info.name, members[0]
    key, round_ = agent.collectives.begin(members)
    if timeout == UNSET_RPC_TIMEOUT:
        seconds, patience = agent.rpc_timeout, None
    elif timeout == DEFAULT_SHUTDOWN_TIMEOUT:
        seconds, patience = timeout, None
    else:
        seconds, patience = timeout, timeout
    try:
        if name == leader:
            _gather(key, name, obj)
        else:
            agent.call(
                agent.peer(leader), _gather, (key, name, obj), timeout=seconds, hooks=False
            ).wait()
        if not round_.complete.wait(patience):
            missing = sorted(set(members) - set(round_.objects) - {name})
            raise RpcTimeoutError(f"{missing} timed out in _all_gather after {timeout:.2f} seconds")
        if round_.lost:
            if name == leader:
                _abort(agent, key, round_, seconds)
            raise WorkerLostError(f"{round_.lost!r} left while others waited for it")
        if name == leader:
            _broadcast(agent, key, round_, members[1:], seconds)
        return round_.objects
    finally:
        agent.collectives.end(key)


def _broadcast(
    agent: Agent, key: _Key, round_: _Round, followers: Iterable[str], seconds: float
) -> None:
    futures = {
        follower: agent.call(
            agent.peer(follower), _finish, (key, round_.objects), timeout=seconds, hooks=False
        )
        for follower in followers
    }
    errors: dict[str, Exception] = {}
    for follower, future in futures.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors[follower] = error
    if errors:
        raise RpcTimeoutError(
            f"Followers {list(errors)} timed out in _all_gather after {seconds:.2f} seconds. "
            f"The first exception is {next(iter(errors.values()))}"
        )


def _abort(agent: Agent, key: _Key, round_: _Round, seconds: float) -> None:
    """Tells those who wait for the leader that one of them is gone."""
    for member in set(round_.objects) - {agent.info.name}:
        with suppress(WorkerNotFoundError):
            future = agent.call(
                agent.peer(member), _fail, (key, round_.lost), timeout=seconds, hooks=False
            )
            future.add_done_callback(lambda done: None)  # whoever is gone as well is no news


@allow.wire_safe()
def _gather(key: _Key, name: str, obj: Any) -> None:
    """On the leader: takes what a member gives."""
    allow.check_sender(name)
    round_ = current.agent().collectives.get(key)
    round_.objects[name] = obj
    if set(round_.objects) == set(key[0]):
        round_.complete.set()


@allow.wire_safe()
def _finish(key: _Key, objects: dict[str, Any]) -> None:
    """On a follower: takes what all members gave."""
    allow.check_sender(key[0][0])
    round_ = current.agent().collectives.get(key)
    round_.objects = objects
    round_.complete.set()


@allow.wire_safe()
def _fail(key: _Key, lost: str) -> None:
    """On a follower: learns that a member is gone."""
    allow.check_sender(key[0][0])
    round_ = current.agent().collectives.get(key)
    round_.lost = lost
    round_.complete.set()
