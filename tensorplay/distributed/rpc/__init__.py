"""Remote procedure calls through the broker.

The names and their meaning are those of ``torch.distributed.rpc``.
"""

from __future__ import annotations

from tensorplay.distributed.rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
)
from tensorplay.distributed.rpc.api import (
    RRef,
    get_rpc_timeout,
    get_worker_info,
    list_workers,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
    wait_for_workers,
)
from tensorplay.distributed.rpc.api import (
    _all_gather as _all_gather,
)
from tensorplay.distributed.rpc.api import (
    _barrier as _barrier,
)
from tensorplay.distributed.rpc.api import (
    _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs,
)
from tensorplay.distributed.rpc.api import (
    _get_current_rpc_agent as _get_current_rpc_agent,
)
from tensorplay.distributed.rpc.api import (
    _is_current_rpc_agent_set as _is_current_rpc_agent_set,
)
from tensorplay.distributed.rpc.api import (
    _set_rpc_timeout as _set_rpc_timeout,
)
from tensorplay.distributed.rpc.api import (
    _use_rpc_pickler as _use_rpc_pickler,
)
from tensorplay.distributed.rpc.api import (
    _wait_all as _wait_all,
)
from tensorplay.distributed.rpc.api import (
    _wait_all_workers as _wait_all_workers,
)
from tensorplay.distributed.rpc.backend_registry import BackendType
from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.initialize import init_rpc
from tensorplay.distributed.rpc.options import (
    BrokerRpcBackendOptions,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
)

__all__ = [
    "BackendType",
    "BrokerRpcBackendOptions",
    "Future",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "api",
    "backend_registry",
    "constants",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "list_workers",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_proxy",
    "shutdown",
    "wait_for_workers",
]


def is_available() -> bool:
    """Returns whether remote procedure calls can be used: always."""
    return True


def _rref_context_get_debug_info() -> dict[str, str]:
    return api._get_current_rpc_agent().rrefs.debug_info()


def _get_debug_info() -> dict[str, str]:
    agent = api._get_current_rpc_agent()
    return {**agent.rrefs.debug_info(), **agent.get_debug_info()}
