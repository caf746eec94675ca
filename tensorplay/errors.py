"""Every exception that tensorplay raises on purpose.

    TensorPlayError
    ├── ConfigError (ValueError)             an option or argument that cannot work
    │   └── InvalidNameError (RuntimeError)  a name that no peer can have
    ├── NotInitializedError (RuntimeError)   no agent in this process: call init_rpc first
    ├── ProtocolError (ValueError)           bytes that are not a message of this protocol
    │   └── MessageTooLargeError             a message beyond the broker's limit
    ├── BrokerError (ConnectionError)        the broker cannot be reached, or does not answer
    │   └── RegistrationError (RuntimeError, ValueError)  the broker refused this peer
    ├── WorkerNotFoundError (ValueError, RuntimeError)  no peer of that name or rank is registered
    ├── WorkerLostError (ConnectionError, RuntimeError)   the peer left or died with calls in flight
    │   └── OwnerLostError                   the owner of an RRef or module is gone
    ├── RpcTimeoutError (TimeoutError, RuntimeError)      a call outlived its time-out
    ├── GraphLostError (RuntimeError)        a backward needs what is kept nowhere any more
    ├── RRefError (RuntimeError)             a remote reference used where or when it cannot be
    ├── NotAllowedError (PermissionError, RuntimeError)  what others sent may not be loaded here
    ├── SerializationError (TypeError, RuntimeError)  an object that cannot travel
    ├── CodeNotFoundError (AttributeError, RuntimeError)  code sent by name that is not here
    ├── AsyncResultError (TypeError, RuntimeError)  an async_execution function without a future
    ├── ArgumentError (TypeError, RuntimeError)  arguments that the function does not take
    ├── CallbackError (RuntimeError)         the callback of ``Future.then`` raised
    └── RemoteError (RuntimeError)           the callee raised something that cannot be rebuilt here

Leaves also inherit the builtin that callers of ``torch.distributed.rpc`` catch.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "AsyncResultError",
    "BrokerError",
    "CallbackError",
    "CodeNotFoundError",
    "ConfigError",
    "GraphLostError",
    "InvalidNameError",
    "MessageTooLargeError",
    "NotAllowedError",
    "NotInitializedError",
    "OwnerLostError",
    "ProtocolError",
    "RRefError",
    "RegistrationError",
    "RemoteError",
    "RpcTimeoutError",
    "SerializationError",
    "TensorPlayError",
    "WorkerLostError",
    "WorkerNotFoundError",
]


class TensorPlayError(Exception):
    """Base class of all errors that tensorplay raises on purpose."""


class ConfigError(TensorPlayError, ValueError):
    """An option or argument has a value that cannot work."""


class InvalidNameError(ConfigError, RuntimeError):
    """A name that no peer can have."""


class NotInitializedError(TensorPlayError, RuntimeError):
    """The RPC agent of this process is not running."""


class ProtocolError(TensorPlayError, ValueError):
    """Bytes were received that are not a message of this protocol."""


class MessageTooLargeError(ProtocolError):
    """A message is larger than the broker admits."""


class BrokerError(TensorPlayError, ConnectionError):
    """The broker cannot be reached, or has stopped answering."""


class RegistrationError(BrokerError, RuntimeError, ValueError):
    """The broker refused to register this peer; the text says why."""


class WorkerNotFoundError(TensorPlayError, ValueError, RuntimeError):
    """No peer with that name or rank is registered in the namespace."""


class WorkerLostError(TensorPlayError, ConnectionError, RuntimeError):
    """The peer left or died while calls to it were in flight."""


class OwnerLostError(WorkerLostError):
    """The process that owned a remote object is gone, and the object with it."""


class RpcTimeoutError(TensorPlayError, TimeoutError, RuntimeError):
    """A call did not finish within its time-out."""


class GraphLostError(TensorPlayError, RuntimeError):
    """A backward reached a graph, or tensors, that no process keeps any more."""


class RRefError(TensorPlayError, RuntimeError):
    """A remote reference was used where, or when, it cannot be."""


class NotAllowedError(TensorPlayError, PermissionError, RuntimeError):
    """Something that a peer sent, or asked for, may not be loaded or called here."""


class SerializationError(TensorPlayError, TypeError, RuntimeError):
    """An object, or a part of it, cannot be sent to another process."""


class CodeNotFoundError(TensorPlayError, AttributeError, RuntimeError):
    """A function or class was sent by name, and its module here does not have it."""


class ArgumentError(TensorPlayError, TypeError, RuntimeError):
    """A function is called with arguments that it does not take; nothing was sent."""


class AsyncResultError(TensorPlayError, TypeError, RuntimeError):
    """A function decorated with ``async_execution`` returned something else than a future."""


class CallbackError(TensorPlayError, RuntimeError):
    """The callback given to ``Future.then`` raised; its exception is the cause."""


class RemoteError(TensorPlayError, RuntimeError):
    """The callee raised an exception that cannot be rebuilt in this process.

    Attributes:
        remote_type: Qualified name of the exception's class on the callee.
        remote_message: ``str()`` of the exception.
        remote_traceback: The formatted traceback on the callee.
        worker: Name of the worker that raised it.
    """

    def __init__(
        self,
        message: str,
        *,
        remote_type: str = "",
        remote_message: str = "",
        remote_traceback: str = "",
        worker: str = "",
    ) -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.worker = worker
