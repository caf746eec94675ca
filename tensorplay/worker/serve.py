"""What a worker process does: register, serve until told to end, leave."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import click

from tensorplay.distributed import rpc
from tensorplay.distributed.rpc.orders import Handler
from tensorplay.distributed.rpc.shm.settings import parse_size
from tensorplay.errors import ConfigError, TensorPlayError
from tensorplay.heap import keep_freed_memory
from tensorplay.protocol.messages import Role

_log = logging.getLogger("tensorplay.worker")

_JOINED = object()
_END = object()

#: Exit code of a worker that an operator has killed.
KILLED = 137

#: Seconds that a worker which is told to end has to finish its registration.
_MOMENT = 0.5
#: Seconds after which a signal is noticed at the latest.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What a worker is told.

    Attributes:
        name: Name to register.
        broker: Where the broker is; None leaves it to ``init_rpc``.
        rank: Rank to take; None for the lowest that is free.
        device: Default device of what is placed here.
        threads: How many calls run at a time.
        imports: Modules to import before registering.
        shm: Whether large tensors go through shared memory to peers on the same host; None
            leaves it to TENSORPLAY_SHM.
        shm_limit: Bytes of shared memory to make at most, or text such as ``"512MiB"``; None
            leaves it to TENSORPLAY_SHM_LIMIT.
        connect_timeout: Seconds to wait for the broker; None is no limit.
        drain_timeout: Seconds that calls under way have to finish when the worker is told to
            end.
        curve_dir: The key directory, see ``BrokerRpcBackendOptions``.
        curve_key: Name of the worker's key in it.
        curve_server: The broker's public key.
        allow: What others may have the worker load and call; None is anything.
    """

    name: str
    broker: str | None = None
    rank: int | None = None
    device: str = "cpu"
    threads: int = rpc.constants.DEFAULT_NUM_WORKER_THREADS
    imports: tuple[str, ...] = field(default=())
    shm: bool | None = None
    shm_limit: int | str | None = None
    connect_timeout: float | None = None
    drain_timeout: float = 10.0
    curve_dir: str | None = None
    curve_key: str | None = None
    curve_server: str | None = None
    allow: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 0:
            raise ConfigError(f"a worker's rank is 0 or more, got {self.rank}")
        if self.shm_limit is not None:
            parse_size(self.shm_limit, "shm_limit")
        if self.drain_timeout < 0:
            raise ConfigError(f"drain_timeout is 0 or more seconds, got {self.drain_timeout}")


def serve(
    config: WorkerConfig,
    ready: Callable[[rpc.WorkerInfo], None],
    orders: Mapping[str, Handler] | None = None,
) -> None:
    """Runs a worker in this process until SIGTERM, SIGINT or the end of its registration.

    Calls under way are finished first, within the limit; a second signal ends the process
    at once. An operator's orders do the same: ``drain`` as the first signal, ``kill`` as the
    second.

    Args:
        config: What the worker is told.
        ready: Called when it is registered.
        orders: What else operators may ask of it, and what answers.

    Raises:
        TensorPlayError: If it cannot register, or loses its registration for good.
        ImportError: If a module that it was told to import cannot be.
    """
    # What happens comes through a queue: unlike an Event, it may be filled by a signal handler
    # that interrupts the thread which reads it.
    news: SimpleQueue[object] = SimpleQueue()
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if told:
            os._exit(128 + number)
        told.append(number)
        news.put(_END)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    # Modules next to where the worker was started can be imported, as in a script.
    if "" not in sys.path:
        sys.path.insert(0, "")

    def join() -> None:
        try:
            _register(config)
        except BaseException as error:
            news.put(error)
        else:
            news.put(_JOINED)

    def leave(arguments: dict[str, Any]) -> dict[str, Any]:
        news.put(_END)
        return {}

    # In a thread of its own, so that a signal ends the wait for a broker.
    joining = threading.Thread(target=join, name="tensorplay-join", daemon=True)
    joining.start()
    first = _next(news)
    if isinstance(first, BaseException):
        raise first
    if first is _END:
        joining.join(_MOMENT)  # it may just be registering; then it says goodbye
    if not rpc._is_current_rpc_agent_set():
        return
    agent = rpc._get_current_rpc_agent()
    if first is not _END:
        agent.on_end(lambda: news.put(_END))
        for what, handler in (orders or {}).items():
            agent.orders.on(what, handler)
        agent.orders.on("drain", leave)
        agent.orders.on("kill", lambda arguments: os._exit(KILLED))
        ready(rpc.get_worker_info())
        for module in config.imports:  # after the registration: loading may take long
            importlib.import_module(module)
        if agent.failure is None:  # else it failed before it could be told
            _next(news)
    if agent.failure is not None:
        raise agent.failure
    _log.info("finishing the calls under way, then leaving")
    if not agent.drain(config.drain_timeout):
        _log.warning("left with calls under way after %s s", config.drain_timeout)
    rpc.shutdown(graceful=False)


def _next(news: SimpleQueue[object]) -> object:
    """Waits for news.

    A signal that comes in the moment before the wait begins does not interrupt it, and its
    handler runs only after it: so it ends now and then.
    """
    while True:
        with suppress(Empty):
            return news.get(timeout=_LOOK_SECONDS)


def _register(config: WorkerConfig) -> None:
    rpc.init_rpc(
        config.name,
        rank=-1 if config.rank is None else config.rank,
        rpc_backend_options=rpc.BrokerRpcBackendOptions(
            num_worker_threads=config.threads,
            connect_timeout=config.connect_timeout,
            shm=config.shm,
            shm_limit=config.shm_limit,
            curve_dir=config.curve_dir,
            curve_key=config.curve_key,
            curve_server=config.curve_server,
            allow=config.allow,
        ),
        broker=config.broker,
        role=Role.WORKER,
        device=config.device,
    )


def run(
    config: WorkerConfig, *, announce: bool = True, orders: Mapping[str, Handler] | None = None
) -> int:
    """Runs a worker and returns the exit code of its process.

    Args:
        config: What the worker is told.
        announce: Whether to print a line when it is registered.
        orders: What else operators may ask of it, and what answers.
    """

    def ready(info: rpc.WorkerInfo) -> None:
        address = rpc._get_current_rpc_agent().address
        line = f"tensorplay worker {info.name} ready (rank {info.id}) at {address}"
        if announce:
            click.echo(line)
        else:
            _log.info("%s", line)

    keep_freed_memory()
    try:
        serve(config, ready, orders)
    except (TensorPlayError, ImportError) as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    return 0
