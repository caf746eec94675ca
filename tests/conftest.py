"""Fixtures of all tests.

``cluster``     three workers, ``worker0`` to ``worker2``, and this process as a client named
                ``client``; one for each module. For tests that break nothing.
``own_cluster`` a function that starts a cluster of a test's own, to kill workers in; not in a
                module that uses ``cluster``, as a process is one peer at a time.
``broker``      a broker in a thread of this process, on a free port.
``free_port``   a port at which nothing listens.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tensorplay.broker import Broker, BrokerConfig
from tensorplay.cluster import ForkServerClient, LocalCluster, local_cluster

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes minutes unless ``-m`` names it."""
    if "long" in str(config.getoption("markexpr")):
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with -m long"))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServerClient]:
    """Forks the workers of all clusters: torch is imported once."""
    with ForkServerClient() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(fork_server: ForkServerClient) -> Iterator[LocalCluster]:
    """Three workers, and this process as their client."""
    with local_cluster(workers=3, fork_server=fork_server) as running:
        yield running


@pytest.fixture
def own_cluster(fork_server: ForkServerClient) -> Iterator[Callable[..., LocalCluster]]:
    """Starts a cluster for one test."""
    with ExitStack() as stack:

        def start(*args: Any, **kwargs: Any) -> LocalCluster:
            return stack.enter_context(local_cluster(*args, fork_server=fork_server, **kwargs))

        yield start


@pytest.fixture
def broker() -> Iterator[Broker]:
    """A broker in a thread of this process."""
    with Broker(BrokerConfig(bind=("tcp://127.0.0.1:0",))) as running:
        yield running


@pytest.fixture
def free_port() -> int:
    """A port of the loopback interface at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fails the session if threads, processes or shared memory of the library are left."""
    before = _shared_memory()
    yield
    threads = [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("tensorplay-") and "-replies" not in thread.name
    ]
    children = [
        " ".join(child.cmdline())
        for child in psutil.Process().children(recursive=True)
        if child.is_running()
        and child.status() != psutil.STATUS_ZOMBIE
        and "tensorplay" in " ".join(child.cmdline())
    ]
    assert not threads, f"threads are left: {threads}"
    assert not children, f"processes are left: {children}"
    assert _shared_memory() <= before, "shared memory is left"


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.glob("*tensorplay*")} if folder.is_dir() else set()
