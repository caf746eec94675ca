"""The backends of ``init_rpc``: there is one, under two names."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from tensorplay.distributed.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC
from tensorplay.distributed.rpc.options import BrokerRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
]


class BackendValue(NamedTuple):
    """What a backend is made of.

    Attributes:
        options: The class of its options.
    """

    options: type[BrokerRpcBackendOptions]


class BackendType(enum.Enum):
    """The backends; TENSORPIPE is another name of BROKER, for scripts written for torch."""

    BROKER = BackendValue(BrokerRpcBackendOptions)
    TENSORPIPE = BROKER

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def backend_registered(backend_name: str) -> bool:
    """Returns whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str | None = None,
    **kwargs: Any,
) -> BrokerRpcBackendOptions:
    """Returns the options of a backend.

    Args:
        backend: The backend.
        rpc_timeout: Seconds until an unanswered call fails.
        init_method: Where the broker is.
        **kwargs: Further options, see ``BrokerRpcBackendOptions``.
    """
    return backend.value.options(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)
