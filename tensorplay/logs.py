"""Logging of the programs: one line a record on stderr, as text or as JSON.

The library itself only logs; it is for the programs, or for the user, to configure it.
"""

from __future__ import annotations

import json as json_module
import logging
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Final, TypeVar

import click

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_F = TypeVar("_F", bound=Callable[..., Any])
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line for a record."""
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_module.dumps(entry, ensure_ascii=False)


def configure(level: str = "info", *, json: bool = False) -> None:
    """Sends this process's log to stderr, in place of what was configured before.

    Args:
        level: The least important level that is shown, one of ``LEVELS``.
        json: Whether to write JSON objects instead of text.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json else logging.Formatter(_TEXT))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def options(level: str = "info", *, json: bool = True) -> Callable[[_F], _F]:
    """Gives a command the options ``--log-level`` and ``--log-json``.

    Args:
        level: The default level.
        json: Whether the command has ``--log-json`` as well.
    """

    def decorate(command: _F) -> _F:
        if json:
            command = click.option(
                "--log-json",
                is_flag=True,
                envvar="TENSORPLAY_LOG_JSON",
                show_envvar=True,
                help="Log JSON objects, one a line.",
            )(command)
        return click.option(
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default=level,
            envvar="TENSORPLAY_LOG_LEVEL",
            show_default=True,
            show_envvar=True,
            help="Least important level that is logged, on standard error.",
        )(command)

    return decorate
