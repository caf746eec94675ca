"""Images for the tests with containers, built once.

They are run by ``pytest -m containers tests/containers``, and by nothing else: the first build
takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.containers.engine import Cluster, Engine, reason_to_skip

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    if "containers" not in (config.option.markexpr or ""):
        reason = "builds images: run pytest -m containers tests/containers"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(1800))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """podman."""
    return Engine(tmp_path_factory.mktemp("podman"))


@pytest.fixture(scope="session")
def images(engine: Engine) -> dict[str, str]:
    """The images of broker and worker; their layers are kept for the next run."""
    names = {what: f"localhost/tensorplay-test-{what}" for what in ("broker", "worker")}
    for what, name in names.items():
        seconds = engine.build(what, name)
        size = int(engine.inspect(name)["Size"]) / 1e6
        print(f"built {name}, {size:.0f} MB, in {seconds:.0f} s")
    return names


@pytest.fixture
def start_cluster(engine: Engine, images: dict[str, str]) -> Iterator[Callable[..., Cluster]]:
    """Makes private networks for one test."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(Cluster(engine, images, *options))
