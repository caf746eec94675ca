"""What operators ask of this process, by way of the broker.

Handlers run in the link's thread: they must not block.  What takes long they begin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tensorplay.errors import TensorPlayError
from tensorplay.protocol.messages import Answer, Ask

#: Takes the arguments of an order and returns what is answered.
Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Orders:
    """Answers questions with handlers that are known by what they answer."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {"ping": _ping}

    def on(self, what: str, handler: Handler) -> None:
        """Has ``handler`` answer from now on; it may raise TensorPlayError."""
        self._handlers[what] = handler

    def answer(self, ask: Ask) -> Answer:
        """Returns the answer to a question; an error if it cannot be answered."""
        handler = self._handlers.get(ask.what)
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            return Answer(ask.id, error=f"this peer does not know {ask.what!r}, but {known}")
        try:
            arguments = msgspec.json.decode(ask.json, type=dict[str, Any])
            return Answer(ask.id, msgspec.json.encode(handler(arguments)))
        except (msgspec.MsgspecError, TensorPlayError) as error:
            return Answer(ask.id, error=f"{ask.what}: {error}")


def _ping(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "wall_time": time.time()}
