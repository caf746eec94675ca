"""Exceptions across processes: described on the callee, rebuilt at the caller."""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
from typing import Any

import cloudpickle
import msgspec
import tblib

from tensorplay.errors import ProtocolError, RemoteError


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An exception, described.

    Attributes:
        type: Qualified name of its class.
        message: ``str()`` of it.
        traceback: The formatted traceback.
        worker: Name of the worker that raised it.
        worker_id: Rank or negative number of that worker.
        pickled: The exception itself, if it can be pickled.
        frames: Its traceback as JSON, for ``tblib``.
    """

    type: str
    message: str
    traceback: str
    worker: str
    worker_id: int
    pickled: bytes = b""
    frames: bytes = b""


class RemoteTraceback(Exception):
    """The traceback on the callee, as the cause of the exception that is raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


_decoder = msgspec.msgpack.Decoder(Failure)


def describe(error: BaseException, worker: str, worker_id: int = 0) -> Failure:
    """Returns the description of an exception that a call has raised."""
    kind = type(error)
    return Failure(
        f"{kind.__module__}.{kind.__qualname__}",
        _text(error),
        "".join(traceback.format_exception(kind, error, error.__traceback__)),
        worker,
        worker_id,
        _pickled(error),
        _frames(error),
    )


def encode(failure: Failure) -> bytes:
    """Returns a description as a frame."""
    return msgspec.msgpack.encode(failure)


def decode(frame: bytes | memoryview) -> Failure:
    """Returns the description in a frame.

    Raises:
        ProtocolError: If it is none.
    """
    try:
        return _decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not the description of an exception: {error}") from None


def rebuild(failure: Failure) -> BaseException:
    """Returns the exception that was described.

    It has its own type where that can be rebuilt here, else it is a ``RemoteError``. An
    exception that would end a process (SystemExit, KeyboardInterrupt) is a ``RemoteError``,
    too. The traceback on the callee is attached and printed with it.
    """
    error = _unpickled(failure)
    if error is None:
        error = RemoteError(
            f"On WorkerInfo(id={failure.worker_id}, name={failure.worker}):\n"
            f"Original exception on remote side was {failure.type}: {failure.message}",
            remote_type=failure.type,
            remote_message=failure.message,
            remote_traceback=failure.traceback,
            worker=failure.worker,
        )
    told = f"\nOn worker {failure.worker!r}:\n{failure.traceback}"
    if sys.version_info >= (3, 11):
        error.add_note(told)
    else:
        error.__cause__ = RemoteTraceback(told)
    return error.with_traceback(_traceback(failure))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # an exception class whose __str__ is broken
        return f"<its text cannot be had: {type(second).__name__}>"


def _pickled(error: BaseException) -> bytes:
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)  # many exceptions pickle, but cannot be rebuilt
    except Exception:
        return b""
    return bytes(data)


def _unpickled(failure: Failure) -> BaseException | None:
    if not failure.pickled:
        return None
    try:
        error = pickle.loads(failure.pickled)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


def _frames(error: BaseException) -> bytes:
    try:
        return msgspec.json.encode(tblib.Traceback(error.__traceback__).to_dict())
    except Exception:  # no traceback, or one whose frames are odd
        return b""


def _traceback(failure: Failure) -> Any:
    """Returns the callee's traceback as an object of this process.

    It is made in a thread of its own: its frames refer to those of the code that makes it,
    which would keep alive whatever the caller's functions have in their variables.
    """
    if not failure.frames:
        return None
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(tblib.Traceback.from_dict(msgspec.json.decode(failure.frames)))
            made[0] = made[0].as_traceback()
        except Exception:
            made.clear()

    thread = threading.Thread(target=make, name="tensorplay-traceback", daemon=True)
    thread.start()
    thread.join()
    return made.pop() if made else None
