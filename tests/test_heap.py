"""What the C library is told about freed memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

import tensorplay.heap as heap

COUNT_FAULTS = """
import ctypes, resource, sys
import tensorplay.heap as heap
if sys.argv[1] == "keep":
    assert heap.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def turn():
    pieces = [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(8)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 20)
    for piece in pieces:
        libc.free(piece)
for _ in range(3):
    turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, mode],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the GNU C library")
def test_freed_memory_is_used_again() -> None:
    assert faults("keep") < faults("default") / 10


def test_the_environment_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not heap.keep_freed_memory()


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not heap.keep_freed_memory()
