"""Processes whose lines are read, and waited for, while they run."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Sequence

#: Seconds that a line may take to come.
PATIENCE = 60.0


class Follower:
    """A process whose lines are read while it runs.

    Args:
        command: What to run.
        environment: Its environment; by default this process's.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.output = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Sends the process a signal."""
        self._process.send_signal(number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def expect(self, text: str, timeout: float = PATIENCE) -> str:
        """Returns the next line that has ``text``, or fails."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {text!r} within {timeout} s:\n{self.output}") from None
            assert line is not None, f"ended without {text!r}:\n{self.output}"
            self.output += line
            if text in line:
                return line

    def send(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self, timeout: float = PATIENCE) -> int:
        """Waits for the end and returns the exit code."""
        code = self._process.wait(timeout)
        self._reader.join(timeout)
        while (line := self._lines.get(timeout=timeout)) is not None:
            self.output += line
        return code

    def close(self) -> None:
        """Ends the process if it still runs."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
