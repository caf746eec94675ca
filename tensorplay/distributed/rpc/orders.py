"""What operators ask of this process, and what it asks of the broker and tells it.

Handlers run in the link's thread: they must not block.  What takes long they begin.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tensorplay.distributed.rpc.future import Future
from tensorplay.distributed.rpc.meters import Meters
from tensorplay.errors import BrokerError, TensorPlayError
from tensorplay.protocol.messages import Answer, Ask, Control, Heartbeat

#: Seconds between two messages that tell the broker of calls that have raised.
_ERRORS_SECONDS = 1.0

#: Takes the arguments of an order and returns what is answered.
Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Orders:
    """Answers the broker's questions with handlers, and asks it questions in turn.

    Args:
        tell: Sends the broker a message, which may be lost.
        meters: Whose errors are told.
    """

    def __init__(self, tell: Callable[[Control], None], meters: Meters) -> None:
        self._tell = tell
        self._meters = meters
        self._handlers: dict[str, Handler] = {"ping": _ping}
        self._numbers = itertools.count(1)
        self._questions: dict[int, Future[dict[str, Any]]] = {}
        self._next_errors = 0.0

    def on(self, what: str, handler: Handler) -> None:
        """Has ``handler`` answer from now on; it may raise TensorPlayError."""
        self._handlers[what] = handler

    def asked(self, ask: Ask) -> None:
        """Answers a question, unless nobody waits for the answer."""
        answer = self.answer(ask)
        if ask.id:
            self._tell(answer)

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

    def ask_broker(self, what: str) -> Future[dict[str, Any]]:
        """Asks the broker itself; the question or the answer may be lost."""
        number = next(self._numbers)
        future = self._questions[number] = Future()
        self._tell(Ask(number, what))
        return future

    def answered(self, answer: Answer) -> None:
        """Takes the broker's answer to a question of this process."""
        question = self._questions.pop(answer.id, None)
        if question is None:
            return
        if answer.error:
            question.set_exception(BrokerError(answer.error))
        else:
            question.set_result(msgspec.json.decode(answer.json))

    def tell_errors(self, now: float) -> float:
        """Tells the broker which calls have raised; returns when to look again."""
        if not self._meters.errors:
            return float("inf")
        if now >= self._next_errors:
            self._next_errors = now + _ERRORS_SECONDS
            self._tell(Heartbeat(now, errors=self._meters.take_errors()))
        return self._next_errors


def _ping(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "wall_time": time.time()}
