"""Which call a thread serves at the moment: the log says it with every record."""

from __future__ import annotations

import threading
from typing import Any


class _Here(threading.local):
    call: tuple[int, str] | None = None


#: ``call`` is the number of the call that the thread serves and the name of its caller.
here = _Here()


def log_fields() -> dict[str, Any]:
    """Returns what a log record of this thread says of the call that it serves."""
    if here.call is None:
        return {}
    number, caller = here.call
    return {"call": number, "caller": caller}
