"""What a worker keeps of its output."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import Any

import pytest

from tensorplay.errors import ConfigError
from tensorplay.worker.output import Output, Ring, keep


def test_a_ring_gives_back_what_was_written() -> None:
    ring = Ring(4096)
    ring.write(b"one\ntwo\n")
    assert ring.read(0, 100) == (b"one\ntwo\n", 8)
    assert ring.read(4, 2) == (b"tw", 6)
    assert ring.read(8, 100) == (b"", 8)
    assert ring.read(99, 100) == (b"", 8)


def test_a_ring_keeps_the_end() -> None:
    ring, everything, rng = Ring(4096), b"", random.Random(5)
    for _ in range(200):
        piece = rng.randbytes(rng.randrange(1, 9000 if rng.random() < 0.1 else 300))
        ring.write(piece)
        everything += piece
        since = rng.randrange(len(everything))
        data, behind = ring.read(since, 1000)
        begin = max(since, len(everything) - 4096)
        assert data == everything[begin : begin + 1000]
        assert behind == begin + len(data)


def test_answers_fit_a_header_and_end_with_lines() -> None:
    ring = Ring(1 << 16)
    ring.write(b"".join(b"\x1b[1m%d\x1b[0m \xff\n" % number for number in range(3000)))
    output, text = Output(ring), ""
    told: dict[str, Any] = {"next": 0, "process": "", "more": True}
    while told["more"]:
        told = output.answer({"since": told["next"], "process": told["process"]})
        assert told["text"].endswith("\n")
        text += told["text"]
    assert text.count("\n") == 3000
    assert "�" in text


def test_a_position_of_another_process_is_none() -> None:
    ring = Ring(4096)
    ring.write(b"hello\n")
    assert Output(ring).answer({"since": 500, "process": "another"})["text"] == "hello\n"


@pytest.mark.parametrize("since", [-1, "x", 1.5])
def test_a_position_that_is_none_is_refused(since: object) -> None:
    with pytest.raises(ConfigError, match="since"):
        Output(Ring(4096)).answer({"since": since})


def test_too_little_cannot_be_kept() -> None:
    assert keep(0) is None
    with pytest.raises(ConfigError, match="4096"):
        keep(100)


def test_output_is_passed_on_and_kept() -> None:
    code = (
        "import os, sys, time\n"
        "from tensorplay.worker.output import keep\n"
        "kept = keep(4096)\n"
        "print('to out'); print('to err', file=sys.stderr); os.system('echo of a child')\n"
        "deadline = time.monotonic() + 10\n"
        "while kept.answer({})['text'].count('\\n') < 3 and time.monotonic() < deadline: pass\n"
        "answer = kept.answer({})['text']\n"
        "print('kept', sorted(answer.splitlines()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "to out\nof a child\nkept ['of a child', 'to err', 'to out']\n"
    assert done.stderr == "to err\n"


def test_last_words_of_a_crash_are_passed_on() -> None:
    code = (
        "import os, sys\nfrom tensorplay.worker.output import keep\nkeep(4096)\n"
        "os.write(2, b'last words\\n' * 20000)\nos.abort()\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == -6
    assert done.stderr.count(b"last words\n") == 20000
    assert time.monotonic() - began < 30
