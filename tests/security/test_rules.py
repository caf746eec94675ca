"""Which rules hold between two agents: by their options, and by the roles of their keys."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tensorplay import keys
from tensorplay.broker import Broker, BrokerConfig
from tensorplay.broker.check import check
from tensorplay.distributed.autograd.engine import _drop
from tensorplay.distributed.rpc.agent import Agent
from tensorplay.errors import NotAllowedError, RemoteError
from tensorplay.protocol.calls import Op
from tensorplay.protocol.messages import PeerInfo
from tensorplay.protocol.refs import RRefKey
from tests.security import served
from tests.security.helpers import KeyRing, agent


class OwnError(Exception):
    """Is known to those alone who import this module."""


def raise_own() -> None:
    raise OwnError("of one's own")


def give(what: Any) -> Any:
    return what


@contextmanager
def two(broker: Broker, first: dict[str, Any], second: dict[str, Any]) -> Iterator[Any]:
    """Runs two agents that see each other: a caller and a callee."""
    with agent("caller", broker, **first) as caller, agent("callee", broker, **second) as callee:
        assert caller.roster.wait_for(lambda: len(caller.roster.all()) == 2, 10)
        yield caller, callee


@pytest.fixture
def plain() -> Iterator[Broker]:
    with Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",))) as broker:
        yield broker


def other(one: Agent) -> PeerInfo:
    return next(peer for peer in one.roster.all() if peer.incarnation != one.incarnation)


def shown(broker: Broker, name: str) -> int:
    """Returns how many violations the broker's status shows of a peer, once it shows one."""
    deadline = time.monotonic() + 10
    while True:
        peers = check(broker.address, 5.0)["namespaces"]["default"]["peers"]
        (count,) = (peer["stats"].get("violations", 0) for peer in peers if peer["name"] == name)
        if count or time.monotonic() > deadline:
            return int(count)
        time.sleep(0.05)


def test_violations_are_refused_counted_and_logged(
    plain: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with two(plain, {}, {"allow": ["tests.security.served"]}) as (caller, callee):
        peer = other(caller)
        assert caller.call(peer, served.add, (1, 2), hooks=False).wait() == 3
        assert callee.stats()["violations"] == 0
        with pytest.raises(
            NotAllowedError, match=r"posix\.system was asked for by 'caller' and refused"
        ):
            caller.call(peer, os.system, ("touch pwned",), hooks=False).wait()
        assert callee.stats()["violations"] == 1
        assert caller.stats()["violations"] == 0
        assert shown(plain, "callee") == 1
    assert "posix.system was asked for by 'caller'" in caplog.text


def test_what_a_peer_asks_of_itself_is_its_own_matter(plain: Broker) -> None:
    with agent("alone", plain, allow=[]) as alone:
        assert alone.call(alone.info, os.getpid, hooks=False).wait() == os.getpid()


def test_callers_may_restrict_replies(plain: Broker) -> None:
    with two(plain, {"allow_replies": ["tests.security.served"]}, {}) as (caller, _):
        peer = other(caller)

        def ask(*args: Any) -> Any:
            return caller.call(peer, give, args, hooks=False).wait()

        assert torch.equal(ask(torch.ones(2)), torch.ones(2))
        assert ask(served.Counter(3)).value == 3
        assert caller.stats()["violations"] == 0
        with pytest.raises(NotAllowedError, match="asked for by 'callee'"):
            ask(os.system)
        assert caller.stats()["violations"] == 1


def test_errors_of_a_restricted_reply_are_told_as_text(plain: Broker) -> None:
    with two(plain, {"allow_replies": []}, {}) as (caller, _):
        peer = other(caller)
        with pytest.raises(ValueError, match="invalid literal"):
            caller.call(peer, int, ("x",), hooks=False).wait()
        with pytest.raises(RemoteError, match=r"OwnError: of one's own") as caught:
            caller.call(peer, raise_own, hooks=False).wait()
        assert not isinstance(caught.value, OwnError)
        assert caller.stats()["violations"] == 0


def test_a_request_keeps_its_rules_while_its_function_calls_others(plain: Broker) -> None:
    with two(plain, {}, {"allow": ["tests.security.test_rules"]}) as (caller, callee):
        _agents.append((callee, other(callee)))
        try:
            assert caller.call(other(caller), call_back, hooks=False).wait() == os.getpid()
        finally:
            _agents.clear()


_agents: list[tuple[Agent, PeerInfo]] = []


def call_back() -> int:
    """Has a reply with what requests may not name; its own calls are no requests of others."""
    one, peer = _agents[0]
    function = one.call(peer, give, (os.getpid,), hooks=False).wait()
    return int(function())


# Roles.


def keyed(ring: KeyRing, name: str, role: keys.KeyRole) -> dict[str, Any]:
    ring.make(name, role=role)
    return {"curve_dir": str(ring.directory)}


def test_a_client_that_only_calls_cannot_be_called(ring: KeyRing, broker: Broker) -> None:
    both, call = keys.KeyRole.BOTH, keys.KeyRole.CALL
    with two(broker, keyed(ring, "caller", both), keyed(ring, "callee", call)) as (one, client):
        assert not other(one).serves
        with pytest.raises(NotAllowedError, match="their keys allow no calls"):
            one.call(other(one), served.add, (1, 2), hooks=False).wait()
        assert client.stats()["violations"] == 1
        assert client.call(other(client), served.add, (1, 2), hooks=False).wait() == 3


def test_a_worker_that_only_serves_cannot_call(ring: KeyRing, broker: Broker) -> None:
    serve, both = keys.KeyRole.SERVE, keys.KeyRole.BOTH
    with two(broker, keyed(ring, "caller", serve), keyed(ring, "callee", both)) as (worker, one):
        with pytest.raises(NotAllowedError, match="their keys allow no calls"):
            worker.call(other(worker), os.getpid, hooks=False).wait()
        assert one.call(other(one), served.add, (1, 2), hooks=False).wait() == 3


def test_values_go_to_callers_only(ring: KeyRing, broker: Broker) -> None:
    serve, both = keys.KeyRole.SERVE, keys.KeyRole.BOTH
    with two(broker, keyed(ring, "caller", serve), keyed(ring, "callee", both)) as (worker, one):
        key = RRefKey(one.incarnation, 1)
        with pytest.raises(NotAllowedError, match="the value of a reference was asked for"):
            worker.call(other(worker), None, (), hooks=False, op=Op.FETCH, rref=key).wait()


def test_gradients_pass_between_roles(ring: KeyRing, broker: Broker) -> None:
    both, call = keys.KeyRole.BOTH, keys.KeyRole.CALL
    with two(broker, keyed(ring, "caller", both), keyed(ring, "callee", call)) as (one, client):
        guard = client.rules.of_request(other(client))
        assert guard is not None
        guard.check_request(_drop, ([1],), {})
        with pytest.raises(NotAllowedError):
            guard.check_request(served.add, (1, 2), {})
        del one
