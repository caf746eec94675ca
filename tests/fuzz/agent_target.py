"""Damaged requests, replies and chunks for an agent, among those of a peer that is well.

The pickle inside a message is left alone: who may send one may run code, and needs no damage
for that.  Everything else is hostile.
"""

from __future__ import annotations

import operator
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from tensorplay.address import BrokerAddress
from tensorplay.distributed.autograd import wire as autograd_wire
from tensorplay.distributed.rpc import current, payload, plain, remote_exception
from tensorplay.distributed.rpc.agent import Agent
from tensorplay.distributed.rpc.options import BrokerRpcBackendOptions
from tensorplay.errors import TensorPlayError
from tensorplay.protocol import wire
from tensorplay.protocol.calls import Block, Offer, Op, RefChanges, Reply, Request, Status
from tensorplay.protocol.chunks import Position
from tensorplay.protocol.messages import (
    PROTOCOL_VERSION,
    Departure,
    Kind,
    PeerInfo,
    Role,
    Route,
    Welcome,
)
from tensorplay.protocol.refs import RefToken, RRefKey
from tensorplay.protocol.session import PeersChanged
from tests.fuzz.mutate import Mutator

_FRIEND, _FOE = 22, 33
#: Frames from one look at everything to the next.
_LOOK = 2000
#: Frames after which the foe leaves and comes back.
_LIFE = 10_000
#: Requests that may wait before the sender does, too.
_BACKLOG = 50

#: What is to be nothing when nobody is there.
_COUNTS = (
    *("calls_in_flight", "requests_in_progress", "requests_queued"),
    *("rrefs_owned", "rrefs_used", "graphs", "autograd_contexts"),
)

#: A message without its Route: kind, frames, and the position of the pickle among them or -1.
Sample = tuple[Kind, list[bytes], int]


class AgentTarget:
    """An agent without a connection; use as a context manager.

    Args:
        seed: Decides what is sent.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._mutator = Mutator(self._random)
        options = BrokerRpcBackendOptions(num_worker_threads=2)
        address = BrokerAddress("tcp://127.0.0.1:1")
        self._agent = Agent("victim", address, role=Role.WORKER, options=options)
        self._me = self._agent.incarnation
        me, self._friend, self._foe = (
            PeerInfo(name, id, incarnation, Role.WORKER)
            for id, (name, incarnation) in enumerate(
                [("victim", self._me), ("friend", _FRIEND), ("foe", _FOE)]
            )
        )
        welcome = Welcome(PROTOCOL_VERSION, 7, me, [me, self._friend, self._foe], 1.0, 5.0, 1 << 26)
        self._agent.on_registered(welcome, False)
        self._agent.on_peers(PeersChanged(joined=(me, self._friend, self._foe)))
        self._replies: list[int] = []
        self._served = threading.Event()
        self._reply = self._agent._callee._send_reply
        self._agent._callee._send_reply = self._replied
        # There is no connection to send by.
        self._agent._link.pump = lambda: None  # type: ignore[method-assign]
        self._agent._link.full = lambda dst: False  # type: ignore[method-assign]
        self._samples = samples(self._me)
        self.sent: Counter[str] = Counter()

    def __enter__(self) -> AgentTarget:
        current.set_agent(self._agent)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        current.set_agent(None)
        self._agent._link.start()  # so that it can end
        self._agent.abandon()

    def run(self, frames: int) -> None:
        """Sends so many damaged messages."""
        for number in range(frames):
            if number % 50 == 0:  # for replies to meet
                self._agent.call(self._foe, operator.add, (number, 1), timeout=0)._retrieved = True
            kind, parts = self._damaged()
            self._feed(kind, parts, _FOE)
            if number % _LOOK == 0:
                self._look(number)
            if number % _LIFE == 0:
                self._leave()
        self._look(frames)
        self._leave()

    def _damaged(self) -> tuple[Kind, list[bytes]]:
        draw = self._random
        kind, parts, pickle = draw.choice(self._samples)
        parts = list(parts)
        changeable = [position for position in range(len(parts)) if position != pickle]
        if changeable and draw.random() < 0.95:
            for position in draw.sample(changeable, 1 if draw.random() < 0.8 else len(changeable)):
                parts[position] = self._mutator.mutate(parts[position])
        way = draw.random()
        if way < 0.05 and parts:
            del parts[draw.randrange(len(parts))]
        elif way < 0.1 and parts:
            parts.insert(draw.randrange(len(parts)) + 1, draw.randbytes(draw.randrange(40)))
        if draw.random() < 0.02:
            kind = draw.choice([Kind.REQUEST, Kind.REPLY, Kind.CHUNK, Kind.CREDIT, Kind.CANCEL])
        return kind, parts

    def _feed(self, kind: Kind, parts: Sequence[bytes], src: int, id: int | None = None) -> None:
        draw = self._random
        size = sum(map(len, parts[1:]))
        if draw.random() < 0.1:
            size = draw.choice([0, 1, 100, 1 << 20, 1 << 40, (1 << 63) - 1, -1])
        number = draw.randrange(1, 60) if id is None else id
        try:
            self._agent.on_message(Route(kind, self._me, src, number, size), list(parts))
            self.sent["taken"] += 1
        except TensorPlayError:  # as the link does
            self.sent["refused"] += 1
        self._agent._link._posted.clear()
        if self._agent.executor.backlog > _BACKLOG:
            self._settle()

    def _settle(self) -> None:
        """Waits until everything that was let in has begun to run."""
        done = threading.Event()
        self._agent.executor.submit(done.set)
        assert done.wait(60.0), "the pool is stuck"
        self._agent._link._posted.clear()

    def _replied(self, dst: int, id: int, reply: Any, frames: Any) -> None:
        if dst == _FRIEND:
            self._replies.append(id)
            self._served.set()
        self._reply(dst, id, reply, frames)
        self.sent["replied"] += 1

    def _look(self, number: int) -> None:
        """Fails if the friend is not served, or if something has grown."""
        self._settle()
        request = [wire.encode(Request(Op.CALL)), *payload.pack((operator.add, (1, 2), {}))]
        self._replies.clear()
        self._served.clear()
        self._agent.on_message(Route(Kind.REQUEST, self._me, _FRIEND, number, 0), request)
        assert self._served.wait(60.0)
        assert self._replies == [number], self._replies
        partial = sum(assembler.total for _, assembler in self._agent._inbound._partial.values())
        assert partial <= 200 << 26  # of few ids, each at most as large as the broker admits
        assert self._agent.executor.size <= 40

    def _leave(self) -> None:
        """Has both leave and come back; fails unless everything of theirs is gone with them.

        Both, as the foe may claim that the friend holds a reference.
        """
        agent = self._agent
        peers = (self._friend, self._foe)
        agent.on_peers(PeersChanged(left=tuple(Departure(peer, True, "left") for peer in peers)))
        deadline = time.monotonic() + 60.0
        while left := self._left_behind():
            assert time.monotonic() < deadline, left
            time.sleep(0.001)
        agent.on_peers(PeersChanged(joined=peers))

    def _left_behind(self) -> dict[str, float]:
        """Returns the counts that are not zero.

        References of which the foe has said that a process has them which never was are left
        out: the owner cannot know that it will not come.
        """
        agent = self._agent
        stats = agent.stats()
        counts = {name: stats[name] for name in _COUNTS if name in stats}
        counts["partial"] = len(agent._inbound._partial)
        users = agent.rrefs._counts.owned._counts.values()
        counts["rrefs_owned"] = sum(bool({_FRIEND, _FOE} & held.keys()) for held in users)
        return {name: n for name, n in counts.items() if n}


def samples(me: int) -> list[Sample]:
    key = RRefKey(_FOE, 5)
    tokens = [RefToken(key, me), RefToken(RRefKey(_FRIEND, 1), _FOE, True)]
    tensors = (torch.arange(6.0).view(2, 3).t(), torch.eye(3).to_sparse(), torch.ones(3) > 0)
    bodies = [
        payload.pack((operator.add, (1, 2), {})),
        payload.pack((operator.add, (torch.ones(3), torch.ones(1, dtype=torch.bfloat16)), {})),
        payload.pack((operator.contains, (list(tensors), 5), {})),
        payload.pack((operator.getitem, (bytearray(70_000), 3), {})),
    ]
    meta = autograd_wire.encode(autograd_wire.Meta(number=3, tracked=[0], context=9, creator=_FOE))
    headers = [
        Request(Op.CALL),
        Request(Op.CALL, 5.0, None, tokens, b"\x01", [], {"cpu": "cpu"}),
        Request(Op.CALL, 0.0, None, [], meta),
        Request(Op.CALL, 0.0, None, [], b"\x01", [20, 70_000]),
        Request(Op.REMOTE, 0.0, key),
        Request(Op.CALL, blocks=[Block(2, 3, 4, 1 << 16, 0, 4096, 12)]),
    ]
    samples: list[Sample] = [
        (Kind.REQUEST, [wire.encode(header), *map(bytes, body)], 1)
        for header in headers
        for body in bodies
    ]
    changes = RefChanges([(key, _FRIEND, 2)], [(key, 1), (RRefKey(me, 4), 3)])
    error = remote_exception.encode(remote_exception.describe(ValueError("x"), "foe", 2))
    recorded = autograd_wire.encode(autograd_wire.Recorded(4, [0]))
    samples += [
        (Kind.REQUEST, [wire.encode(Request(Op.REFS)), wire.encode(changes)], -1),
        (Kind.REQUEST, [wire.encode(Request(Op.FETCH, 0.0, key))], -1),
        (Kind.REQUEST, [wire.encode(Request(Op.PROBE)), wire.encode(Offer(5))], -1),
        (Kind.REPLY, [wire.encode(Reply(Status.OK)), *map(bytes, payload.pack(3))], 1),
        (
            Kind.REPLY,
            [
                wire.encode(Reply(Status.OK, tokens, recorded)),
                *map(bytes, payload.pack(torch.ones(3))),
            ],
            1,
        ),
        (Kind.REPLY, [wire.encode(Reply(Status.OK, [], b"", [100, 9]))], -1),
        *[
            (kind, [wire.encode(header), *map(bytes, body.frames)], -1)
            for body in (plain.pack((1, "a", None), {"b": 2.0}), plain.pack((torch.ones(3),), {}))
            if body is not None
            for kind, header in (
                (Kind.REQUEST, Request(Op.CALL, function=1, meta=b"\x01")),
                (Kind.REPLY, Reply(Status.OK)),
                (Kind.REPLY, Reply(Status.OK, [], recorded)),
            )
        ],
        (Kind.REPLY, [wire.encode(Reply(Status.ERROR)), bytes(error)], 1),
        *[
            (Kind.CHUNK, [wire.encode(Position(kind, offset)), bytes(100)], -1)
            for kind in (Kind.REQUEST, Kind.REPLY)
            for offset in (0, 100)
        ],
        (Kind.CANCEL, [], -1),
    ]
    return samples
