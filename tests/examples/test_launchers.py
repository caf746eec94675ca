"""The examples in which another system places the workers, where that is installed."""

from __future__ import annotations

import pytest

from tests.examples.test_examples import example, loss_falls


@pytest.mark.parametrize(
    ("package", "name", "workers"),
    [
        ("distributed", "dask_workers.py", ("dask-0", "dask-1")),
        ("ray", "ray_workers.py", ("ray-0", "ray-1")),
    ],
)
def test_another_system_places_the_workers(
    package: str, name: str, workers: tuple[str, ...]
) -> None:
    pytest.importorskip(package)
    output = example(name)
    for worker in workers:
        assert worker in output
    loss_falls(output)
