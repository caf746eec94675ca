"""Whether memory is shared, and how much of it: from options or the environment."""

from __future__ import annotations

import os
import re

from tensorplay.errors import ConfigError

#: Turns shared memory on (1, the default) or off (0).
SHM_VARIABLE = "TENSORPLAY_SHM"
#: Bytes of shared memory that a process makes at most.
LIMIT_VARIABLE = "TENSORPLAY_SHM_LIMIT"

_ON = {"1", "true", "on", "yes"}
_OFF = {"0", "false", "off", "no"}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def enabled(option: bool | None) -> bool:
    """Returns whether memory is shared.

    Args:
        option: What the options say; None leaves it to the environment.

    Raises:
        ConfigError: If the environment says neither yes nor no.
    """
    if option is not None:
        return option
    text = os.environ.get(SHM_VARIABLE, "1").strip().lower()
    if text not in _ON | _OFF:
        raise ConfigError(f"the variable {SHM_VARIABLE} is 1 or 0, got {text!r}")
    return text in _ON


def limit(option: int | str | None) -> int | None:
    """Returns how many bytes of shared memory a process makes at most, None for the default.

    Args:
        option: What the options say; None leaves it to the environment.

    Raises:
        ConfigError: If that is no size.
    """
    if option is not None:
        return parse_size(option, "shm_limit")
    text = os.environ.get(LIMIT_VARIABLE)
    return parse_size(text, f"the variable {LIMIT_VARIABLE}") if text else None


def parse_size(size: int | str, what: str) -> int:
    """Returns a number of bytes, given as such or as text like ``"512MiB"`` or ``"2G"``.

    Args:
        size: The size; units are powers of 1024.
        what: Name of the setting, for the error.

    Raises:
        ConfigError: If it is no size, or negative.
    """
    match = _SIZE.fullmatch(str(size))
    if match is None:
        raise ConfigError(f"{what} is a number of bytes such as 1073741824 or 1GiB, got {size!r}")
    number, unit = match.groups()
    return int(float(number) * 1024 ** " kmgt".index(unit.lower() or " "))
