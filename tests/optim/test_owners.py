"""Dividing parameters by owner, and calling the owners."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from tensorplay.distributed import rpc
from tensorplay.distributed.optim.owners import Call, call_all, flatten, shares, value
from tensorplay.distributed.rpc import RRef, api
from tensorplay.protocol.messages import PeerInfo

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("cluster")]


def fail(text: str) -> None:
    raise KeyError(text)


def peer(name: str) -> PeerInfo:
    return api._get_current_rpc_agent().peer(name)


def test_parameters_are_divided_by_owner() -> None:
    here = torch.ones(1)
    a, b, c = (rpc.remote(name, torch.ones, (1,)) for name in ("worker0", "worker1", "worker0"))
    parts = shares([a, here, b, RRef(here), c])
    assert [part.positions for part in parts] == [[0, 4], [1, 3], [2]]
    assert [part.peer and part.peer.name for part in parts] == ["worker0", None, "worker1"]
    assert flatten(a) == [a]
    assert flatten(iter([a, b])) == [a, b]
    assert value(RRef(here)) is here
    with pytest.raises(TypeError, match="tensors, RRefs"):
        flatten([a, None])


def test_all_are_called_at_the_same_time() -> None:
    begin = time.monotonic()
    names = ["worker0", "worker1", "worker2"]
    calls = [Call(peer(name), time.sleep, (0.5,)) for name in names]
    call_all([*calls, Call(None, time.sleep, (0.5,))])
    assert time.monotonic() - begin < 1.5


def test_the_first_failure_is_raised_and_the_others_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = [Call(peer(name), fail, (name,)) for name in ("worker0", "worker1")]
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="worker0"):
        call_all([*calls, Call(None, fail, ("here",))])
    assert "worker1" in caplog.text
    assert "this process" in caplog.text
