"""What a client notes of its calls, and what the driver notes of its faults."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class Call(msgspec.Struct):
    """One call of a client.

    Attributes:
        id: Unique in the run.
        kind: What was called, such as ``"echo"``.
        client: Who called.
        workers: Who had to answer, in turn.
        timeout: Seconds that it was given; 0 if it has no deadline of its own.
        start: When it was made, by the monotonic clock that all processes of a host share.
        end: When it ended; None if the client died before.
        outcome: ``"ok"``, or the class of what it raised.
        text: What that said.
    """

    id: str
    kind: str
    client: str
    workers: list[str]
    timeout: float
    start: float
    end: float | None = None
    outcome: str = ""
    text: str = ""


class Fault(msgspec.Struct):
    """One thing that was broken.

    Attributes:
        kind: What was done, such as ``"kill"``.
        target: Name of a peer, or ``"broker"``.
        start: When it began.
        end: When it was mended.
    """

    kind: str
    target: str
    start: float
    end: float = float("inf")


class Book:
    """The calls of one client process, each written down when it is made and when it ends.

    Args:
        folder: Where the file lies.
        client: Name of the client.
    """

    def __init__(self, folder: Path, client: str) -> None:
        self._client = client
        self._prefix = f"{client}.{os.getpid()}"
        self._number = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"calls-{os.getpid()}", flags, 0o600)

    def new_id(self) -> str:
        """Returns the name of a call to come."""
        self._number += 1  # of several threads: a number may be used by only one
        return f"{self._prefix}.{self._number}.{time.monotonic_ns():x}"

    @contextmanager
    def call(
        self, id: str, kind: str, *workers: str, timeout: float, expect: type | None = None
    ) -> Iterator[None]:
        """Notes what becomes of the call that is made within.

        Args:
            id: Name of the call.
            kind: What is called.
            *workers: Who has to answer, in turn.
            timeout: Its time-out.
            expect: What it must raise; another exception is noted and raised.
        """
        call = Call(id, kind, self._client, list(workers), timeout, time.monotonic())
        self._write(call)
        try:
            yield
            call.outcome = "nothing raised" if expect is not None else "ok"
        except BaseException as error:
            if expect is not None and type(error) is expect:
                call.outcome = "ok"
                return
            call.outcome, call.text = type(error).__name__, str(error)[:500]
            raise
        finally:
            call.end = time.monotonic()
            self._write(call)

    def _write(self, call: Call) -> None:
        os.write(self._file, msgspec.json.encode(call) + b"\n")


def calls(folder: Path) -> dict[str, Call]:
    """Returns all calls by id, as they ended."""
    found: dict[str, Call] = {}
    for file in folder.glob("calls-*"):
        for line in file.read_bytes().splitlines():
            call = msgspec.json.decode(line, type=Call)
            found[call.id] = call
    return found
