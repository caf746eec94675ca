"""Logging of the programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from tensorplay.logs import configure

_log = logging.getLogger("tensorplay.test")


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Leaves the root logger as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_records_are_lines_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    _log.debug("unseen")
    _log.info("seen %d", 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO tensorplay.test: seen 1")


def test_records_are_json_objects(capsys: pytest.CaptureFixture[str]) -> None:
    configure("debug", json=True)
    _log.debug("ünïcode\nand lines")
    try:
        raise ValueError("why")
    except ValueError:
        _log.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == "ünïcode\nand lines"
    assert (first["level"], first["logger"]) == ("debug", "tensorplay.test")
    assert first["time"].endswith("+00:00")
    assert "ValueError: why" in second["exception"]


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    configure("error")
    _log.info("unseen")
    _log.error("seen")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_records_say_where_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    where = {"worker": "worker0", "call": 7, "caller": "trainer"}
    configure("info", context=lambda: where)
    _log.info("hello")
    _log.info("call 8 of 'other' raised", extra={"call": 8, "caller": "other"})
    configure("info", json=True, context=lambda: where)
    _log.info("hello")
    _log.info("it raised", extra={"call": 8, "caller": "other"})
    text, told, entry, other = capsys.readouterr().err.splitlines()
    assert text.endswith("INFO tensorplay.test: [worker0, call 7 of 'trainer'] hello")
    assert told.endswith("[worker0] call 8 of 'other' raised")
    assert where.items() <= json.loads(entry).items()
    assert json.loads(other)["call"] == 8
    assert json.loads(other)["caller"] == "other"
