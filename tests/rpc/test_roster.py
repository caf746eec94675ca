"""Who is there: a fixed world is complete once, though its members may be gone by then."""

from __future__ import annotations

import threading

import pytest

from tensorplay.distributed.rpc.roster import PeerRoster
from tensorplay.errors import WorkerNotFoundError
from tensorplay.protocol.messages import Departure, PeerInfo, Role

ME, OTHER = (PeerInfo(f"w{rank}", rank, 10 + rank, Role.WORKER) for rank in range(2))
CLIENT = PeerInfo("client", -2, 30, Role.CLIENT)


def complete(roster: PeerRoster) -> bool:
    return roster.world_was_complete


def left(peer: PeerInfo) -> Departure:
    return Departure(peer, clean=True, reason="left")


def test_a_world_is_complete_when_all_its_ranks_are_here() -> None:
    roster = PeerRoster(2)
    roster.update_self(ME)
    roster.change([CLIENT], [])
    assert not complete(roster)
    assert roster.missing() == [1]
    roster.change([OTHER], [])
    assert complete(roster)
    assert not roster.missing()


def test_a_member_that_has_left_meanwhile_was_there() -> None:
    roster = PeerRoster(2)
    roster.update_self(ME)
    roster.change([OTHER], [])
    roster.change([], [left(OTHER)])
    assert roster.wait_for(lambda: complete(roster), 0.0)
    assert roster.missing() == [1]


def test_members_that_were_never_here_at_the_same_time_make_no_world() -> None:
    roster = PeerRoster(3)
    roster.update_self(ME)
    roster.change([OTHER], [])
    third = PeerInfo("w2", 2, 12, Role.WORKER)
    roster.change([third], [left(OTHER)])
    assert not complete(roster)


def test_who_waits_is_woken_by_a_refusal() -> None:
    roster = PeerRoster(2)
    roster.update_self(ME)
    refusal = threading.Timer(0.0, roster.change, ([], [], ["no"]))
    refusal.start()
    assert roster.wait_for(lambda: bool(roster.refused), 10.0)
    refusal.join()


def test_one_that_has_left_is_found_only_if_it_will_do() -> None:
    roster = PeerRoster()
    roster.update_self(ME)
    roster.change([OTHER], [])
    roster.change([], [left(OTHER)])
    assert roster.find("w1", departed=True) == OTHER
    with pytest.raises(WorkerNotFoundError, match=r"registered are w0 \(0\)"):
        roster.find("w1")
