"""Keeps the end of what a worker's process prints, so that others can ask for it.

Standard output and error become pipes.  A small process at their other end passes on what
comes, and copies it into a ring in shared memory that the worker reads.  A thread could
not do that: one that needs Python's lock reads nothing while native code holds it, which
would then wait for ever once its output fills the pipe.  And what a worker says as it
crashes is passed on all the same.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import signal
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from tensorplay.errors import ConfigError

#: Bytes that are kept unless told otherwise, and at least.
DEFAULT_BYTES = 1 << 20
MIN_BYTES = 4096
#: Bytes of an answer as JSON: it travels in one header.
_MAX_ANSWER = 12 << 10
_HEAD = struct.Struct("<Q")


class Ring:
    """The last bytes of a stream, in memory that two processes share.

    One process writes, another reads; what it reads while it is overwritten is dropped.

    Args:
        size: How many bytes are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, _HEAD.size + size)  # anonymous, inherited by a fork

    @property
    def end(self) -> int:
        """Bytes written so far."""
        total: int = _HEAD.unpack_from(self._memory)[0]
        return total

    def write(self, data: bytes) -> None:
        """Adds to the stream."""
        end = self.end
        for offset in range(0, len(data), self._size):
            piece = data[offset : offset + self._size]
            at = end % self._size
            first = min(len(piece), self._size - at)
            start = _HEAD.size + at
            self._memory[start : start + first] = piece[:first]
            self._memory[_HEAD.size : _HEAD.size + len(piece) - first] = piece[first:]
            end += len(piece)
        _HEAD.pack_into(self._memory, 0, end)

    def read(self, since: int, size: int) -> tuple[bytes, int]:
        """Returns at most ``size`` bytes from a position on, and the position behind them.

        What is not kept any more is left out.
        """
        end = self.end
        begin = min(max(since, end - self._size, 0), end)
        stop = min(begin + size, end)
        at, count = begin % self._size, stop - begin
        first = min(count, self._size - at)
        start = _HEAD.size + at
        data = (
            self._memory[start : start + first]
            + self._memory[_HEAD.size : _HEAD.size + count - first]
        )
        overwritten = max(0, self.end - self._size - begin)
        return data[overwritten:], stop


class Output:
    """What this process has printed.

    Args:
        ring: Where it is kept.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._process = secrets.token_hex(8)

    def answer(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a piece of the output: the answer to the order ``logs``.

        Args:
            arguments: ``since``: the position from which on it is wanted; ``process``: the
                process whose position that is, as an earlier answer gave it.

        Returns:
            ``text``, the position ``next`` behind it, ``process``, and ``more``: whether there
            is more already.

        Raises:
            ConfigError: If the position is none.
        """
        since = arguments.get("since", 0)
        if not isinstance(since, int) or since < 0:
            raise ConfigError(f"since is a position of 0 or more, got {since!r}")
        if arguments.get("process") != self._process:
            since = 0
        size = _MAX_ANSWER
        while True:
            data, behind = self._ring.read(since, size)
            if behind < self._ring.end:
                data, behind = _whole_lines(data, behind)
            answer = {
                "text": data.decode("utf-8", "replace"),
                "next": behind,
                "process": self._process,
                "more": behind < self._ring.end,
            }
            # What JSON escapes can be several times as long.
            if len(msgspec.json.encode(answer)) <= _MAX_ANSWER:
                return answer
            size //= 2


def keep(size: int) -> Output | None:
    """Begins to keep what this process prints; early, while it is small and has one thread.

    Args:
        size: Bytes that are kept; 0 keeps none.

    Returns:
        The output, or None if none is kept: also where standard output is not the process's own.

    Raises:
        ConfigError: If the size is too small for a line.
    """
    if not size:
        return None
    if size < MIN_BYTES:
        raise ConfigError(f"at least {MIN_BYTES} bytes of output can be kept (0: none), got {size}")
    try:
        if (sys.stdout.fileno(), sys.stderr.fileno()) != (1, 2):
            return None
    except (OSError, ValueError):  # replaced, as by a test
        return None
    ring = Ring(size)
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = {1: os.pipe(), 2: os.pipe()}
    if os.fork() == 0:
        _pass_on({pipes[1][0]: 1, pipes[2][0]: 2}, [pipes[1][1], pipes[2][1]], ring)
    for target, (out, into) in pipes.items():
        os.close(out)
        os.dup2(into, target)
        os.close(into)
    # Lines are wanted when they are written, not when a buffer is full.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return Output(ring)


def _pass_on(sources: dict[int, int], unused: list[int], ring: Ring) -> NoReturn:
    """Copies each source to its target and into the ring until all have ended."""
    try:
        for descriptor in (0, *unused):
            with suppress(OSError):
                os.close(descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the worker ends first, and has last words
        poller = select.poll()
        for source in sources:
            poller.register(source, select.POLLIN)
        while sources:
            for source, _ in poller.poll():
                data = os.read(source, 1 << 16)
                if not data:
                    poller.unregister(source)
                    del sources[source]
                    continue
                ring.write(data)
                _write(sources[source], data)
    finally:
        os._exit(0)


def _write(target: int, data: bytes) -> None:
    with suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(target, data) :]


def _whole_lines(data: bytes, behind: int) -> tuple[bytes, int]:
    """Returns a piece of a stream up to its last line's end, if there is one."""
    cut = data.rfind(b"\n") + 1
    return (data[:cut], behind - (len(data) - cut)) if cut else (data, behind)
