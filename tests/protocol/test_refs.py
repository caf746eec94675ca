"""Counting of references: the rules, by example."""

from __future__ import annotations

import msgspec
import pytest

from tensorplay.protocol import refs
from tensorplay.protocol.calls import RefChanges
from tensorplay.protocol.refs import OwnerTable, RefCounts, RefToken, RRefKey, UserTable

OWNER, P, Q = 1, 2, 3
KEY = RRefKey(P, 0)
OWN = RRefKey(OWNER, 0)


def test_keys_and_tokens_survive_the_wire() -> None:
    changes = RefChanges(adds=[(KEY, Q, 1)], releases=[(OWN, 2)])
    token = RefToken(KEY, OWNER, counted=True)
    for value in (changes, token):
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
        assert decoded == value
    assert hash(RRefKey(P, 0)) == hash(KEY)


def test_a_reference_lives_while_any_count_is_not_zero() -> None:
    table = OwnerTable(OWNER)
    assert not table.add(KEY, P)
    assert table.apply(Q, [], [(KEY, 1)]) == []  # the release overtakes the news of Q
    assert table.apply(P, [(KEY, Q, 1)], [(KEY, 1)]) == [KEY]
    assert KEY not in table
    assert len(table) == 0


def test_news_of_one_report_count_together() -> None:
    table = OwnerTable(OWNER)
    table.add(OWN, P)
    assert table.apply(P, [(OWN, Q, 1)], [(OWN, 1)]) == []
    assert table.users() == 1


def test_a_departed_process_takes_its_counts_along() -> None:
    table = OwnerTable(OWNER)
    table.add(KEY, P)
    table.add(KEY, Q)
    assert table.leave(Q) == []
    assert table.leave(P) == [KEY]


def test_late_news_of_the_departed_changes_nothing() -> None:
    table = OwnerTable(OWNER)
    table.leave(Q)
    table.add(KEY, P)
    assert table.apply(P, [(KEY, Q, 1)], []) == []
    assert table.apply(P, [], [(KEY, 1)]) == [KEY]


@pytest.mark.parametrize("key", [OWN, KEY], ids=["of this process", "of a departed one"])
def test_news_of_references_that_were_freed_leaves_nothing(key: RRefKey) -> None:
    table = OwnerTable(OWNER)
    table.leave(P)
    table.apply(Q, [(key, Q, 1)], [(key, 2)])
    assert len(table) == 0


def test_only_a_reference_under_way_may_come() -> None:
    table = OwnerTable(OWNER)
    assert table.may_come(KEY)
    assert not table.may_come(OWN)
    table.leave(P)
    assert not table.may_come(KEY)
    table.join(P)
    assert not table.may_come(KEY), "it was dropped when its creator was thought dead"
    table.leave(Q)
    table.join(Q)
    assert not table.may_come(RRefKey(9, 0), asker=Q)


def test_the_memory_of_the_departed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refs, "DEPARTED_LIMIT", 2)
    table = OwnerTable(OWNER)
    for peer in (5, 6, 7):
        table.leave(peer)
    assert [table.is_departed(peer) for peer in (5, 6, 7)] == [False, True, True]


def test_a_release_carries_how_often_the_reference_came() -> None:
    table = UserTable()
    table.receive(KEY, OWNER)
    table.receive(KEY, OWNER)
    table.drop(KEY)
    assert table.drain() == []
    table.drop(KEY)
    assert table.drain() == [(OWNER, [], [(KEY, 2)])]
    assert table.settled
    assert KEY not in table


def test_a_reference_that_comes_again_is_counted_anew() -> None:
    table = UserTable()
    for _ in range(2):
        table.receive(KEY, OWNER)
        table.drop(KEY)
    assert table.drain() == [(OWNER, [], [(KEY, 2)])]


def test_a_release_waits_until_adds_are_acknowledged() -> None:
    table = UserTable()
    table.receive(KEY, OWNER)
    table.announce(KEY, OWNER, Q)
    assert table.drain() == [(OWNER, [(KEY, Q, 1)], [])]
    table.drop(KEY)
    assert not bool(table.due)
    assert table.drain() == []
    table.acknowledged(OWNER)
    assert bool(table.due)
    assert table.drain() == [(OWNER, [], [(KEY, 1)])]
    assert table.settled


def test_an_announcement_that_was_not_sent_cancels_out() -> None:
    table = UserTable()
    table.receive(KEY, OWNER)
    table.announce(KEY, OWNER, Q)
    table.announce(KEY, OWNER, Q, -1)
    assert table.settled
    assert table.drain() == []


def test_nothing_is_owed_to_a_departed_owner() -> None:
    table = UserTable()
    table.receive(KEY, OWNER)
    table.announce(KEY, OWNER, Q)
    table.leave(OWNER)
    table.receive(KEY, OWNER)
    table.announce(KEY, OWNER, Q)
    table.drop(KEY)
    table.drop(KEY)
    assert table.drain() == []
    assert table.settled
    assert len(table) == 0


def test_letting_go_of_all_voids_later_drops() -> None:
    table = UserTable()
    table.receive(KEY, OWNER)
    table.use(KEY)
    table.drop_all()
    table.drop(KEY)
    assert table.drain() == [(OWNER, [], [(KEY, 1)])]


def test_a_reference_made_for_another_is_held_until_it_is_made() -> None:
    counts = RefCounts(OWNER)
    counts.expect(KEY, P)
    assert counts.owned.apply(P, [], [(KEY, 1)]) == []
    assert counts.made(KEY)


def test_a_reference_to_itself_is_held_until_it_is_made() -> None:
    counts = RefCounts(OWNER)
    counts.expect(OWN, OWNER)
    assert OWN in counts.owned
    assert counts.made(OWN)


def test_a_message_to_oneself_holds_what_it_contains() -> None:
    counts = RefCounts(OWNER)
    token = counts.export(OWN, OWNER, OWNER, kept=False)
    counts.receive(token, OWNER)
    assert OWN in counts.owned
    assert counts.settle(token)

    user = RefCounts(Q)
    user.used.receive(KEY, OWNER)
    token = user.export(KEY, OWNER, Q, kept=False)
    user.used.drop(KEY)
    user.receive(token, Q)
    assert KEY in user.used
    user.settle(token)
    assert user.used.drain() == [(OWNER, [], [(KEY, 1)])]


@pytest.mark.parametrize("kept", [True, False])
def test_a_reference_sent_home_is_held_there_until_unpacked(kept: bool) -> None:
    owner, user = RefCounts(OWNER), RefCounts(P)
    owner.expect(KEY, P)
    owner.made(KEY)
    user.used.receive(KEY, OWNER)
    token = user.export(KEY, OWNER, OWNER, kept=kept)
    assert bool(user.used.drain()) is not kept
    if not kept:
        owner.owned.apply(P, [(KEY, P, 1)], [])
        user.used.acknowledged(OWNER)
    owner.receive(token, P)
    user.used.drop(KEY)
    [(_, adds, releases)] = user.used.drain()
    assert owner.owned.apply(P, adds, releases) == []
    assert owner.settle(token)


def test_a_message_that_was_never_sent_leaves_no_count() -> None:
    owner, user = RefCounts(OWNER), RefCounts(P)
    assert owner.unexport(owner.export(OWN, OWNER, Q, kept=False), Q)
    user.used.receive(KEY, OWNER)
    for dst in (OWNER, P, Q):
        for kept in (True, False):
            assert not user.unexport(user.export(KEY, OWNER, dst, kept=kept), dst)
    user.used.drop(KEY)
    assert user.used.drain() == [(OWNER, [], [(KEY, 1)])]


def test_a_process_that_was_thought_dead_counts_again() -> None:
    counts = RefCounts(OWNER)
    counts.leave(Q)
    assert counts.is_departed(Q)
    counts.join(Q)
    counts.export(OWN, OWNER, Q, kept=False)
    assert OWN in counts.owned
