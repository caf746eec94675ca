"""The agent of this process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from tensorplay.errors import NotInitializedError

if TYPE_CHECKING:
    from tensorplay.distributed.rpc.agent import Agent

_lock = threading.Lock()
_agent: Agent | None = None
_pid = os.getpid()  # kept, as every call asks for it


def _note_fork() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def is_of_this_process(agent: Agent) -> bool:
    """Returns whether an agent was made in this process, not in one that it was forked from."""
    return agent.pid == _pid


def agent() -> Agent:
    """Returns the agent of this process.

    Raises:
        NotInitializedError: If it has none, or only the one it inherited by a fork.
    """
    current = _agent
    if current is None:
        raise NotInitializedError(
            "RPC has not been initialized. Current RPC agent is not set! Did you initialize the "
            "RPC framework (e.g. by calling `tensorplay.distributed.rpc.init_rpc`)?"
        )
    if current.pid != _pid:
        raise NotInitializedError(
            "RPC has not been initialized in this process, which was forked from one where it "
            "was: an agent cannot be shared between processes, call init_rpc in this process"
        )
    return current


def is_set() -> bool:
    """Returns whether this process has an agent of its own."""
    return _agent is not None and is_of_this_process(_agent)


def set_agent(new: Agent | None) -> None:
    """Makes ``new`` the agent of this process, or leaves it without one.

    Raises:
        RuntimeError: If it has one already.
    """
    global _agent
    with _lock:
        if new is not None and is_set():
            raise RuntimeError("RPC is already initialized: call shutdown first")
        _agent = new
