"""Joining: ``init_rpc``."""

from __future__ import annotations

import logging
import os

from tensorplay.distributed.rpc import current, ending, rendezvous
from tensorplay.distributed.rpc.agent import Agent
from tensorplay.distributed.rpc.backend_registry import BackendType
from tensorplay.distributed.rpc.options import (
    BrokerRpcBackendOptions,
    RpcBackendOptions,
    check_name,
)
from tensorplay.errors import BrokerError, ConfigError, RegistrationError
from tensorplay.protocol.messages import Role

_log = logging.getLogger(__name__)


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    broker: str | None = None,
    role: Role | None = None,
    device: str = "cpu",
) -> None:
    """Makes this process a peer: able to call and to be called.

    With ``world_size`` it waits until all of the world have come, and ``shutdown`` waits
    for all of them. Without, it joins at once and leaves when it likes.

    Unless the program has a handler of its own, SIGTERM then ends it cleanly: it raises
    SystemExit in the main thread, calls under way have ``drain_timeout`` seconds (an option)
    to finish, and the process leaves the broker. A second SIGTERM ends it at once.

    Args:
        name: Name to register, unique in the namespace.
        backend: Kept for scripts written for ``torch.distributed.rpc``; there is one.
        rank: Rank to take. Without one a worker gets the lowest that is free, a client none.
            An ``init_method`` needs one, as for torch, unless ``role`` is given.
        world_size: Number of processes of a fixed world.
        rpc_backend_options: A ``BrokerRpcBackendOptions``.
        broker: ``"tcp://host:port[/namespace]"`` or ``"ipc://path[?namespace]"``. Not given,
            the options' ``init_method`` decides, then the variable TENSORPLAY_BROKER, then
            MASTER_ADDR and MASTER_PORT, where rank 0 starts the broker; else a broker is
            started on the loopback interface of this machine.
        role: WORKER is given a rank even if it asks for none; the default is CLIENT.
        device: Default device of what is placed here, as others see it.

    Raises:
        RuntimeError: If this process is a peer already.
        RegistrationError: If the broker refuses: the name or rank is not unique, or the
            versions do not fit.
        BrokerError: If no broker answers, or not all of the world come in time.
        ConfigError: If an argument cannot work.
        TypeError: If an argument has the wrong type.
    """
    options = _checked_options(backend, rpc_backend_options)
    check_name(name)
    if current.is_set():
        raise RuntimeError("RPC is already initialized: call shutdown first")
    if broker is None and rank < 0 and world_size is None:
        rank, world_size = _from_launcher(options.init_method, ranked=role is None)
    if world_size is not None and not 0 <= rank < world_size:
        raise ConfigError(
            f"a fixed world of {world_size} needs a rank from 0 to {world_size - 1}, got {rank}"
        )
    fixed = world_size is not None
    agent = Agent(
        name,
        rendezvous.find_broker(broker, options.init_method, rank, options.curve_dir),
        role=role or (Role.WORKER if fixed else Role.CLIENT),
        rank=rank,
        world_size=world_size,
        options=options,
        device=device,
    )
    if options.drain_timeout is not None:
        ending.end_on_sigterm()
    # Before it starts: others may call as soon as they see it.
    current.set_agent(agent)
    try:
        agent.start()
        if world_size is not None:
            _wait_for_world(agent, world_size, options.world_timeout)
    except BaseException:
        current.set_agent(None)
        agent.close(timeout=1.0, reason="did not join")
        rendezvous.stop_embedded_broker()
        raise


def _checked_options(
    backend: BackendType | None, options: RpcBackendOptions | None
) -> BrokerRpcBackendOptions:
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if options is None:
        return BrokerRpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if not isinstance(options, BrokerRpcBackendOptions):
        if backend is None:
            raise TypeError(f"Could not infer backend for options {options}")
        raise TypeError(
            f"the backend {backend!r} takes BrokerRpcBackendOptions, not {type(options).__name__}"
        )
    return options


def _from_launcher(init_method: str | None, *, ranked: bool) -> tuple[int, int | None]:
    """Returns the rank and world size of a process that was given neither.

    Args:
        init_method: The option of that name.
        ranked: Whether an ``init_method`` needs a rank, as it does for torch.

    Raises:
        ConfigError: If it does, and there is none.
    """
    by_environment = init_method is not None and init_method.startswith("env://")
    if by_environment or (init_method is None and "MASTER_ADDR" in os.environ):
        if "RANK" in os.environ and (by_environment or "WORLD_SIZE" in os.environ):
            size = os.environ.get("WORLD_SIZE")
            return int(os.environ["RANK"]), None if size is None else int(size)
        if by_environment and ranked:
            raise ConfigError(
                f"{init_method}: environment variable RANK expected, but not set; set it, or join "
                "without a rank by broker="
            )
    elif init_method is not None and ranked:
        raise ConfigError(
            f"{init_method}: rank parameter missing; give rank=, or the address as broker=, which "
            "needs none"
        )
    return -1, None


def _wait_for_world(agent: Agent, world_size: int, timeout: float) -> None:
    roster = agent.roster
    roster.wait_for(lambda: bool(roster.refused) or roster.world_was_complete, timeout)
    if roster.world_was_complete:
        return
    if roster.refused:
        raise RegistrationError(f"the world cannot be complete: {roster.refused[0]}")
    raise BrokerError(
        f"ranks {roster.missing()} of a world of {world_size} did not come within {timeout} s; "
        f"registered are {roster.describe()}"
    )
