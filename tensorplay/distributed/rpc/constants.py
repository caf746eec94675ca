"""Defaults of the RPC layer."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

#: Seconds until an unanswered call raises ``RpcTimeoutError``.
DEFAULT_RPC_TIMEOUT_SEC: Final = 60.0

#: How many times as long as others the creation of a remote module and the first call of a
#: handle may take: weights are loaded, kernels compiled.
FIRST_CALL_FACTOR: Final = 10

#: Stands for "the default time-out of the agent" where a call takes one.
UNSET_RPC_TIMEOUT: Final = -1.0

#: Seconds that ``shutdown`` waits for the others; 0 is no limit.
DEFAULT_SHUTDOWN_TIMEOUT: Final = 0.0

#: Threads that run the calls of others.
DEFAULT_NUM_WORKER_THREADS: Final = 16

#: How long ``init_rpc`` waits for the other processes of a fixed world.
DEFAULT_PROCESS_GROUP_TIMEOUT: Final = timedelta(minutes=30)

#: Seconds that ``init_rpc`` waits for the broker.
DEFAULT_CONNECT_TIMEOUT_SEC: Final = 60.0

#: Seconds that calls under way have to finish when a process is told to end by SIGTERM.
DEFAULT_DRAIN_TIMEOUT_SEC: Final = 10.0

#: Payload bytes that may be under way to one peer, unconsumed there.
DEFAULT_WINDOW_BYTES: Final = 64 << 20

#: Marks functions whose result is a future of the result.
ASYNC_EXECUTION_MARK = "_wrapped_async_rpc_function"
