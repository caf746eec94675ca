"""A short run; ``python -m tests.soak`` makes the long one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorplay.cluster import LocalCluster
from tests.soak import soak


@pytest.mark.timeout(100)
def test_nothing_grows(own_cluster: Callable[..., LocalCluster]) -> None:
    plan = soak.Plan(calls=6000, rrefs=600, passes=600, rounds=10)
    assert soak.run(own_cluster(workers=1), plan)["complaints"] == []
