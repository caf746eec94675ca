"""A session that nobody uses for a day is still there: by a clock that runs ahead."""

from __future__ import annotations

from tensorplay.protocol.session import State
from tests.protocol.test_session_model import SessionModel

DAY = 24 * 3600


def deliver(model: SessionModel) -> None:
    while model.to_me:
        model.arrive(1, False)


def test_a_day_without_a_call_changes_nothing() -> None:
    model = SessionModel()
    deliver(model)
    assert model.session.state is State.REGISTERED
    for _ in range(DAY // 30):
        for _ in range(30):
            model.pass_time(1.0)
            deliver(model)
        assert model.session.state is State.REGISTERED
        assert not model.closed
    assert model.now >= DAY
    assert model.connections == 0  # and it was the same connection all the time
