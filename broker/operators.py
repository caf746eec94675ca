"""Questions and orders of operators: on their way to a peer, and the answers back.

An operator is whoever may connect; it need not be registered.  Each question that goes on
gets a number of the broker's own, so that a peer can answer nothing that it was not asked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec

from tensorplay.broker.events import Command, Send
from tensorplay.broker.registry import Namespace, Peer, Registry
from tensorplay.protocol import wire
from tensorplay.protocol.messages import Answer, Ask, Role

#: Questions that may wait for the answers of peers; the oldest is given up for a new one.
MAX_WAITING = 1024
#: Names that an error lists.
_NAMES = 20


@dataclass(frozen=True, slots=True)
class _Question:
    asker: bytes
    id: int
    peer: Peer


class Operators:
    """Passes on what operators ask, and answers what is asked of the broker itself.

    Args:
        registry: The peers.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: dict[int, _Question] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, asker: bytes, ask: Ask, now: float) -> tuple[list[Command], Peer | None]:
        """Takes a question.

        Returns:
            What is to be done, and the peer that was reached, if one was.
        """
        if not ask.name:
            if ask.what != "time":
                return [_error(asker, ask.id, f"a broker is not asked for {ask.what!r}")], None
            return [_answer(asker, Answer(ask.id, msgspec.json.encode({"time": now})))], None
        peer = self._registry.namespace(ask.namespace).by_name.get(ask.name)
        if peer is None:
            return [_error(asker, ask.id, self._unknown(ask))], None
        if ask.what == "drain" and peer.info.role is not Role.WORKER:
            text = f"{ask.name!r} is a client: only workers finish their calls and leave; kill it"
            return [_error(asker, ask.id, text)], None
        if ask.what == "kill":  # no answer can be expected
            answer = _answer(asker, Answer(ask.id))
            return [*self._pass_on(peer, ask, 0), answer], peer
        if peer.identity is None:
            return [_error(asker, ask.id, f"{ask.name!r} is away: {peer.away}")], None
        return self._pass_on(peer, ask, self._enter(_Question(asker, ask.id, peer))), peer

    def answered(self, peer: Peer, answer: Answer) -> list[Command]:
        """Takes a peer's answer to a question that it was asked."""
        question = self._waiting.get(answer.id)
        if question is None or question.peer is not peer:
            return []
        del self._waiting[answer.id]
        return [_answer(question.asker, Answer(question.id, answer.json, answer.error))]

    def lost(self, peer: Peer, reason: str) -> list[Command]:
        """Answers those who wait for a peer that is gone."""
        numbers = [key for key, question in self._waiting.items() if question.peer is peer]
        questions = [self._waiting.pop(number) for number in numbers]
        text = f"{peer.info.name!r} is gone: {reason}"
        return [_error(question.asker, question.id, text) for question in questions]

    def _enter(self, question: _Question) -> int:
        if len(self._waiting) >= MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        number = next(self._numbers)
        self._waiting[number] = question
        return number

    def _pass_on(self, peer: Peer, ask: Ask, number: int) -> list[Command]:
        if peer.identity is None:
            return []
        return [Send(peer.identity, wire.encode(Ask(number, ask.what, json=ask.json)))]

    def _unknown(self, ask: Ask) -> str:
        namespace = self._registry.namespace(ask.namespace)
        others = [
            other
            for other in self._registry.namespaces.values()
            if other is not namespace and ask.name in other.by_name
        ]
        hint = f"; one is in namespace {others[0].name!r}" if others else ""
        return (
            f"no peer {ask.name!r} is registered in namespace {ask.namespace!r} "
            f"({_names(namespace)}){hint}"
        )


def _names(namespace: Namespace) -> str:
    names = sorted(namespace.by_name)
    if not names:
        return "nobody is"
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{', '.join(names[:_NAMES])}{more} {'is' if len(names) == 1 else 'are'}"


def _answer(asker: bytes, answer: Answer) -> Command:
    return Send(asker, wire.encode(answer))


def _error(asker: bytes, id: int, text: str) -> Command:
    return _answer(asker, Answer(id, error=text))
