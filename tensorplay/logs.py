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
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(where)s%(message)s"

#: Returns what is to be said of where a record comes from: worker, call, caller.
Context = Callable[[], dict[str, Any]]


class TextFormatter(logging.Formatter):
    """One line a record; ``[worker0, call 12 of 'trainer']`` before the message says where.

    Args:
        context: Gives what is known of the thread that logs: ``worker``, ``call``, ``caller``.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(_TEXT)
        self._context = context or dict

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line for a record."""
        told = self._context()
        parts = [told["worker"]] if "worker" in told else []
        if "call" in told and not hasattr(record, "call"):  # else the message says it
            parts.append(f"call {told['call']} of {told['caller']!r}")
        record.where = f"[{', '.join(parts)}] " if parts else ""
        return super().format(record)


#: What a record may say of a call itself.
_SAID = ("call", "caller")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, exception.

    Args:
        context: Gives further fields, such as ``worker``, ``call`` and ``caller``.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__()
        self._context = context or dict

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line for a record."""
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **self._context(),
        }
        # Of a record that says it itself: another thread may tell of a call.
        entry.update((key, getattr(record, key)) for key in _SAID if hasattr(record, key))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_module.dumps(entry, ensure_ascii=False)


def configure(level: str = "info", *, json: bool = False, context: Context | None = None) -> None:
    """Sends this process's log to stderr, in place of what was configured before.

    Args:
        level: The least important level that is shown, one of ``LEVELS``.
        json: Whether to write JSON objects instead of text.
        context: Gives what is to be said of where a record comes from.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(context) if json else TextFormatter(context))
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
