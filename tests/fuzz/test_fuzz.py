"""Short runs; ``python -m tests.fuzz`` makes long ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import psutil
import pytest
import zmq

from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.protocol import wire
from tensorplay.protocol.messages import Route
from tests.broker.helpers import RawPeer
from tests.fuzz.__main__ import run
from tests.fuzz.agent_target import samples
from tests.fuzz.mutate import Mutator
from tests.protocol.test_messages import EXAMPLES
from tests.rpc import helpers

FRAMES = 20_000
LIVE_FRAMES = 2000


@pytest.mark.timeout(100)
def test_damaged_messages_disturb_neither_broker_nor_agent() -> None:
    run(FRAMES, seed=5)


@pytest.mark.timeout(100)
def test_damaged_messages_by_way_of_real_sockets(own_cluster: Callable[..., LocalCluster]) -> None:
    cluster = own_cluster(workers=1)
    chooser = random.Random(3)
    mutator = Mutator(chooser)
    worker = rpc._get_current_rpc_agent().peer("worker0").incarnation
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    processes = [psutil.Process(pid) for pid in (cluster.broker_pid, cluster.pids["worker0"])]
    before = [process.memory_info().rss for process in processes]
    try:
        with RawPeer(context, cluster.address) as foe, RawPeer(context, cluster.address) as other:
            foe.register("foe", 77)
            bodies = samples(worker)
            for number in range(LIVE_FRAMES):
                kind, parts, pickle = chooser.choice(bodies)
                parts = [
                    part if position == pickle else mutator.mutate(part)
                    for position, part in enumerate(parts)
                ]
                size = sum(map(len, parts[1:]))
                route = Route(kind, worker, 77, chooser.randrange(60), size, number + 1)
                foe.send(wire.encode(route), *parts)
                header = mutator.mutate(wire.encode(chooser.choice(EXAMPLES)))
                other.send(header, *[chooser.randbytes(9)] * chooser.randrange(3))
                while foe.receive(0.0) is not None or other.receive(0.0) is not None:
                    pass
                if number % 500 == 0:
                    answer = rpc.rpc_sync("worker0", helpers.add, (number, 1), timeout=20)
                    assert answer == number + 1
    finally:
        context.destroy(linger=0)
    assert rpc.rpc_sync("worker0", os.getpid, timeout=20) == cluster.pids["worker0"]
    for process, size in zip(processes, before, strict=True):
        assert process.memory_info().rss - size < 64 << 20
