"""What a process tells ``init_rpc`` about itself, and how workers are named."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tensorplay.distributed.rpc.allow import wire_safe
from tensorplay.distributed.rpc.constants import (
    DEFAULT_CONNECT_TIMEOUT_SEC,
    DEFAULT_DRAIN_TIMEOUT_SEC,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_PROCESS_GROUP_TIMEOUT,
    DEFAULT_RPC_TIMEOUT_SEC,
    DEFAULT_WINDOW_BYTES,
    UNSET_RPC_TIMEOUT,
)
from tensorplay.distributed.rpc.shm import settings
from tensorplay.errors import ConfigError, InvalidNameError
from tensorplay.keys import PeerKeys, peer_keys

DeviceType: TypeAlias = int | str | torch.device
DeviceMap: TypeAlias = dict[torch.device, torch.device]

#: Names are shorter than this.
MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9_:-]*")

__all__ = [
    "BrokerRpcBackendOptions",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
]


@wire_safe(builds=True, calls=False)
class WorkerInfo:
    """Name and id of a peer; immutable, hashable, equal by both.

    Args:
        name: Unique in the namespace.
        id: The rank, or a negative number for a client without one.

    Raises:
        InvalidNameError: If no peer can have that name.
    """

    __slots__ = ("_id", "_name")

    def __init__(self, name: str, id: int) -> None:
        check_name(name)
        self._name = name
        self._id = id

    @property
    def name(self) -> str:
        """The peer's name."""
        return self._name

    @property
    def id(self) -> int:
        """The peer's rank, or a negative number."""
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return (self._name, self._id) == (other._name, other._id)

    def __hash__(self) -> int:
        return hash((self._name, self._id))

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self._name, self._id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self._id}, name={self._name})"


def check_name(name: str) -> None:
    """Checks that a peer can have that name.

    Raises:
        InvalidNameError: If not; the text says what a name may be.
    """
    if not name:
        raise InvalidNameError("Worker name must be non-empty")
    if len(name) >= MAX_NAME_LENGTH:
        raise InvalidNameError(
            f"Worker name must be shorter than {MAX_NAME_LENGTH} characters, "
            f"{name[:20]!r}... has {len(name)}"
        )
    if not _NAME.fullmatch(name):
        raise InvalidNameError(f"Worker name must match {_NAME.pattern}, but got {name!r}")


def checked_timeout(seconds: float | None) -> float:
    """Returns the time-out of a call in seconds; 0, for None as well, is no limit.

    Raises:
        ConfigError: If it is negative, and not the value that stands for the default.
    """
    if seconds is None:
        return 0.0
    if not seconds >= 0 and seconds != UNSET_RPC_TIMEOUT:
        raise ConfigError(f"a time-out is 0 or None (no limit) or more seconds, got {seconds}")
    return seconds


class RpcBackendOptions:
    """Options that every backend has.

    Args:
        rpc_timeout: Seconds until an unanswered call fails; 0 is no limit.
        init_method: Where the broker is: ``"tcp://host:port[/namespace]"``,
            ``"ipc://path[?namespace]"``, or ``"env://"``. None leaves it to ``init_rpc``.

    Raises:
        ConfigError: If the time-out is negative.
        TypeError: If it is no number.
    """

    def __init__(
        self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str | None = None
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method

    @property
    def rpc_timeout(self) -> float:
        """Seconds until an unanswered call fails; 0 is no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: Any) -> None:
        if not hasattr(seconds, "__float__"):
            raise TypeError(
                "incompatible constructor arguments: rpc_timeout is a number of seconds, got "
                f"{seconds!r}, a {type(seconds).__name__}"
            )
        if not float(seconds) >= 0.0:
            raise ConfigError(f"rpc_timeout must be 0 (no limit) or more seconds, got {seconds}")
        self._rpc_timeout = float(seconds)


class BrokerRpcBackendOptions(RpcBackendOptions):
    """Options of the agent that talks through a broker.

    Args:
        num_worker_threads: Threads that run the calls of others. The pool grows while
            calls wait for further calls, so that nesting never deadlocks.
        rpc_timeout: Seconds until an unanswered call fails; 0 is no limit.
        init_method: Where the broker is, see ``RpcBackendOptions``.
        device_maps: For each callee, by name, which of its devices a tensor on a device of
            this process goes to. Tensors on devices that are not mapped arrive on the host.
        devices: The CUDA devices that this process uses for calls; kept for its readers,
            every device can be used whether it is named here or not.
        connect_timeout: Seconds to wait for the broker; None is no limit.
        world_timeout: Seconds to wait for all members of a fixed world.
        drain_timeout: Seconds that calls under way have to finish when the process is told to
            end by SIGTERM; None leaves that signal alone. See ``init_rpc``.
        window_bytes: Payload bytes that may be under way to one peer before it has consumed
            them; a sender beyond it waits.
        shm: Whether large tensors go through shared memory to peers on the same host; None
            leaves it to the variable TENSORPLAY_SHM (1 or 0), which is 1 if not set.
        shm_limit: Bytes of shared memory that this process makes at most, also as text such as
            ``"2GiB"``; None leaves it to the variable TENSORPLAY_SHM_LIMIT, which is a quarter
            of the memory of the machine, or container, if not set.
        curve_dir: The key directory, for a broker that asks for keys, see `tensorplay keys`.
            None leaves it to the variable TENSORPLAY_CURVE_DIR, "" uses no keys.
        curve_key: Name of this process's key in it; by default TENSORPLAY_CURVE_KEY, or the
            name that it registers.
        curve_server: The broker's public key, or a file with it; by default
            TENSORPLAY_CURVE_SERVER, or ``broker.key`` in the key directory.
        allow: What requests of others may load and call here, beside plain values: modules, each
            with what is below it, and full names of classes and functions. None is anything.
        allow_replies: What replies of others may load here, likewise.

    Raises:
        ConfigError: If a value cannot work; the text names it.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str | None = None,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        connect_timeout: float | None = DEFAULT_CONNECT_TIMEOUT_SEC,
        world_timeout: float = DEFAULT_PROCESS_GROUP_TIMEOUT.total_seconds(),
        drain_timeout: float | None = DEFAULT_DRAIN_TIMEOUT_SEC,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        shm: bool | None = None,
        shm_limit: int | str | None = None,
        curve_dir: str | None = None,
        curve_key: str | None = None,
        curve_server: str | None = None,
        allow: Sequence[str] | None = None,
        allow_replies: Sequence[str] | None = None,
        _transports: object = None,
        _channels: object = None,
    ) -> None:
        del _transports, _channels  # torch's; there is one transport here
        super().__init__(rpc_timeout, init_method)
        if num_worker_threads < 1:
            raise ConfigError(f"num_worker_threads must be at least 1, got {num_worker_threads}")
        if drain_timeout is not None and not drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must be None, or 0 or more s, got {drain_timeout}")
        if window_bytes < 1:
            raise ConfigError(f"window_bytes must be at least 1, got {window_bytes}")
        self.num_worker_threads = num_worker_threads
        self.connect_timeout = connect_timeout
        self.world_timeout = world_timeout
        self.drain_timeout = drain_timeout
        self.window_bytes = window_bytes
        self.shm = settings.enabled(shm)
        self.shm_limit = settings.limit(shm_limit)
        self.curve_dir = curve_dir
        self.curve_key = curve_key
        self.curve_server = curve_server
        self.allow = _names("allow", allow)
        self.allow_replies = _names("allow_replies", allow_replies)
        self.device_maps: dict[str, DeviceMap] = {}
        for name, device_map in (device_maps or {}).items():
            self.set_device_map(name, device_map)
        self.devices: list[torch.device] = []
        self.set_devices(devices or [])

    def keys(self, name: str) -> PeerKeys | None:
        """Returns the keys that a peer of that name is to use, or None for none.

        Raises:
            ConfigError: If a key is missing, or a secret one is readable by others.
        """
        directory = self.curve_dir
        if directory is None:
            directory = os.environ.get("TENSORPLAY_CURVE_DIR")
        if not directory:
            return None
        key = self.curve_key or os.environ.get("TENSORPLAY_CURVE_KEY") or name
        server = self.curve_server or os.environ.get("TENSORPLAY_CURVE_SERVER")
        return peer_keys(directory, key, server)

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Adds to the map of devices for one callee.

        Args:
            to: Name of the callee.
            device_map: This process's device to the callee's; one to one.

        Raises:
            ConfigError: If two devices are mapped to one, or one to two.
        """
        merged = dict(self.device_maps.get(to, {}))
        for source, target in device_map.items():
            source, target = torch.device(source), torch.device(target)
            if merged.get(source, target) != target:
                raise ConfigError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} "
                    f"to {target} and {merged[source]}"
                )
            merged[source] = target
        sources: DeviceMap = {}
        for source, target in merged.items():
            if target in sources:
                raise ConfigError(
                    "`device_map` only supports 1-to-1 mapping, trying to map "
                    f"{source} and {sources[target]} to {target}"
                )
            sources[target] = source
        self.device_maps[to] = merged

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Sets the CUDA devices that this process uses for calls.

        Raises:
            ConfigError: If one is no CUDA device.
        """
        self.devices = [torch.device(device) for device in devices]
        for device in self.devices:
            if device.type != "cuda":
                raise ConfigError(
                    "`set_devices` expect a list of CUDA devices, but got "
                    f"device type {device.type}."
                )


def _names(option: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(names, str):
        raise ConfigError(f"{option} is a list of names, got the text {names!r}")
    return None if names is None else tuple(names)


#: The name that scripts written for ``torch.distributed.rpc`` use.
TensorPipeRpcBackendOptions = BrokerRpcBackendOptions
