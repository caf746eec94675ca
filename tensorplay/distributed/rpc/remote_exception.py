"""Exceptions across processes: described on the callee, rebuilt at the caller.

An exception that passes through several processes, each a caller of the next, carries one
text: every process adds the frames of its own, and none repeats those of the others.
"""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import replace
from types import TracebackType
from typing import Any

import msgspec
import tblib

from tensorplay.distributed.rpc import allow, payload
from tensorplay.errors import ProtocolError, RemoteError

#: Exceptions of a chain (``raise ... from ...``) that travel.
_LONGEST_CHAIN = 10
#: Frames that travel, the innermost ones; the text of the traceback has all of them.
_MOST_FRAMES = 50


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An exception, described.

    Attributes:
        type: Qualified name of its class.
        message: ``str()`` of it.
        traceback: The formatted traceback.
        worker: Name of the worker that raised it.
        worker_id: Rank or negative number of that worker.
        pickled: Payload frames of the exception, if it comes out of its pickle as it went in.
        parts: Else, payload frames of its class, arguments and attributes, of the last two what
            can be pickled.
        frames: Its traceback as JSON, for ``tblib``.
        cause: The exception that it was raised from.
    """

    type: str
    message: str
    traceback: str
    worker: str
    worker_id: int
    pickled: list[bytes] = []
    parts: list[bytes] = []
    frames: bytes = b""
    cause: Failure | None = None


class RemoteTraceback(Exception):  # noqa: N818  (it tells of an error, and is none)
    """The traceback on the callee, as the cause of an exception that cannot have notes.

    Attributes:
        depth: How many frames at the end of the exception's traceback it tells of.
    """

    def __init__(self, text: str, depth: int) -> None:
        super().__init__(text)
        self.depth = depth


class _Note(str):
    """The note of an exception with the traceback on the callee.

    Attributes:
        depth: How many frames at the end of the exception's traceback it tells of.
    """

    __slots__ = ("depth",)
    depth: int


_decoder = msgspec.msgpack.Decoder(Failure)


def describe(error: BaseException, worker: str, worker_id: int = 0) -> Failure:
    """Returns the description of an exception that a call has raised."""
    with allow.guarding(None):  # what is tried out here is this process's own
        return _describe(error, worker, worker_id, _format(error), _LONGEST_CHAIN)


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
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not the description of an exception: {error}") from None


def rebuild(failure: Failure) -> BaseException:
    """Returns the exception that was described.

    It has its own type where that can be rebuilt here. If its class does not let itself be
    made again from the exception's arguments, or an attribute cannot travel, it is of its own
    type and a ``RemoteError`` at once. Else, and for what would end a process (SystemExit,
    KeyboardInterrupt), it is a ``RemoteError``. The traceback on the callee is attached and
    printed with it.
    """
    guard = allow.current()
    # An exception that may not be loaded is told as text, and is nobody's fault.
    with allow.guarding(guard and replace(guard, violated=lambda: None)):
        error = _rebuild(failure)
    depth = _length(error.__traceback__)
    text = f"\nOn worker {failure.worker!r}:\n{failure.traceback}"
    if sys.version_info >= (3, 11):
        note = _Note(text)
        note.depth = depth
        _set(error, "__notes__", [*getattr(error, "__notes__", ()), note])
    else:
        _set(error, "__cause__", RemoteTraceback(text, depth))
    return error


# ----------------------------------------------------------------------------- describing


def _describe(
    error: BaseException, worker: str, worker_id: int, text: str, longest: int
) -> Failure:
    cls = _class(error)
    cause = error.__cause__
    pickled = _pickled(error) if cls is type(error) else []
    return Failure(
        f"{cls.__module__}.{cls.__qualname__}",
        _text(error),
        text,
        worker,
        worker_id,
        pickled,
        [] if pickled else _parts(error, cls),
        _frames(error),
        None
        if cause is None or isinstance(cause, RemoteTraceback) or longest == 1
        else _describe(cause, worker, worker_id, "", longest - 1),
    )


def _class(error: BaseException) -> type[BaseException]:
    """Returns the class that an exception had where it was raised."""
    return getattr(type(error), "_remote_class", type(error))


def _text(error: BaseException) -> str:
    if hasattr(type(error), "_remote_class"):
        return str(getattr(error, "remote_message", ""))
    try:
        return _sendable(str(error))
    except Exception as second:  # an exception class whose __str__ is broken
        return f"<its text cannot be had: {type(second).__name__}>"


def _sendable(text: str) -> str:
    """Returns a text without lone surrogates, which stand for undecodable bytes of file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def _format(error: BaseException) -> str:
    """Returns the traceback as text: of a remote exception, what its note does not tell."""
    told = [*getattr(error, "__notes__", ()), error.__cause__]
    depth = max((one.depth for one in told if isinstance(one, (_Note, RemoteTraceback))), default=0)
    own = max(_length(error.__traceback__) - depth, 0) if depth else None
    # The chain of a remote exception is in its note, too; a RemoteTraceback is in the chain.
    chain = not depth or isinstance(error.__cause__, RemoteTraceback)
    try:
        lines = traceback.format_exception(
            type(error), error, error.__traceback__, limit=own, chain=chain
        )
    except Exception as second:  # an exception class that breaks the formatting
        return f"<its traceback cannot be had: {type(second).__name__}>"
    return _sendable("".join(lines))


def _length(frames: TracebackType | None) -> int:
    return sum(1 for _ in traceback.walk_tb(frames))


def _pickled(error: BaseException) -> list[bytes]:
    try:
        frames = [bytes(frame) for frame in payload.pack(error)]
        copy = payload.unpack(frames)  # many exceptions pickle, but come out otherwise or not
        return frames if type(copy) is type(error) and str(copy) == str(error) else []
    except BaseException:  # whatever an exception class does: the caller waits for an answer
        return []


def _parts(error: BaseException, cls: type[BaseException]) -> list[bytes]:
    args = [arg if _can_travel(arg) else repr(arg) for arg in error.args]
    state = {
        name: value
        for name, value in getattr(error, "__dict__", {}).items()
        if name != "__notes__" and _can_travel(value)
    }
    try:
        return [bytes(frame) for frame in payload.pack((cls, args, state))]
    except Exception:  # the class itself cannot travel
        return []


def _can_travel(value: Any) -> bool:
    try:
        payload.unpack([bytes(frame) for frame in payload.pack(value)])
    except BaseException:
        return False
    return True


def _frames(error: BaseException) -> bytes:
    frames = error.__traceback__
    for _ in range(_length(frames) - _MOST_FRAMES):
        assert frames is not None
        frames = frames.tb_next
    try:
        return msgspec.json.encode(tblib.Traceback(frames).to_dict())
    except Exception:  # no traceback, or one whose frames are odd
        return b""


# ----------------------------------------------------------------------------- rebuilding


def _rebuild(failure: Failure) -> BaseException:
    error = _unpickled(failure) or _put_together(failure)
    if error is None:
        error = RemoteError(_summary(failure))
        _tell(error, failure)
    notes = getattr(error, "__notes__", None)
    if notes:  # what those of the other processes say is in the text of the last one
        _set(error, "__notes__", [note for note in notes if not isinstance(note, _Note)])
    if failure.cause is not None:
        _set(error, "__cause__", _rebuild(failure.cause))
    return error.with_traceback(_traceback(failure))


def _unpickled(failure: Failure) -> Exception | None:
    if not failure.pickled:
        return None
    try:
        error = payload.unpack(failure.pickled)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


def _put_together(failure: Failure) -> Exception | None:
    """Returns an exception of its own class without running the class's constructor."""
    if not failure.parts:
        return None
    try:
        cls, args, state = payload.unpack(failure.parts)
        if not issubclass(cls, Exception):
            return None
        kin = type(
            cls.__name__,
            (cls,) if issubclass(cls, RemoteError) else (cls, RemoteError),
            {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__str__": lambda self: self._remote_text,
                "_remote_class": cls,
            },
        )
        builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        error = builtin.__new__(kin, *args)
        _set(error, "args", tuple(args))
        error.__dict__.update(state)
        if "_remote_text" not in state:  # else another process has told already
            _set(error, "_remote_text", _summary(failure))
            _tell(error, failure)
    except Exception:  # it is told as a RemoteError then
        return None
    return error if isinstance(error, Exception) else None


def _summary(failure: Failure) -> str:
    return (
        f"On WorkerInfo(id={failure.worker_id}, name={failure.worker}):\n"
        f"Original exception on remote side was {failure.type}: {failure.message}"
    )


def _tell(error: Any, failure: Failure) -> None:
    _set(error, "remote_type", failure.type)
    _set(error, "remote_message", failure.message)
    _set(error, "remote_traceback", failure.traceback)
    _set(error, "worker", failure.worker)


def _set(error: BaseException, name: str, value: Any) -> None:
    """Sets an attribute, also of an exception that is frozen (a data class can be)."""
    BaseException.__setattr__(error, name, value)


def _traceback(failure: Failure) -> TracebackType | None:
    """Returns the callee's traceback as an object of this process.

    It is made in a thread of its own: its frames refer to those of the code that makes it,
    which would keep alive whatever the caller's functions have in their variables.
    """
    if not failure.frames or allow.current() is not None:
        return None
    made: list[TracebackType] = []

    def make() -> None:
        try:
            found = tblib.Traceback.from_dict(msgspec.json.decode(failure.frames))
            made.append(found.as_traceback())
        except Exception:
            made.clear()

    thread = threading.Thread(target=make, name="tensorplay-traceback", daemon=True)
    thread.start()
    thread.join()
    return made.pop() if made else None
