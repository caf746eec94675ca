"""How processes find the broker and each other: addresses, fixed worlds, launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorplay import keys
from tensorplay.cluster import LocalCluster
from tensorplay.distributed import rpc
from tensorplay.distributed.rpc.agent import Agent
from tensorplay.errors import BrokerError, ConfigError
from tensorplay.protocol.messages import Role
from tests.rpc import helpers

Start = Callable[..., LocalCluster]

#: The variables that decide where the broker is.
VARIABLES = ("TENSORPLAY_BROKER", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")

MEMBER = textwrap.dedent(
    """
    import os, sys, torch
    from tensorplay.distributed import rpc

    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    assert [worker.id for worker in rpc._get_current_rpc_agent().get_worker_infos()] == [0, 1, 2]
    total = rpc.rpc_sync((rank + 1) % size, torch.add, (torch.ones(2), rank))
    assert total.tolist() == [rank + 1.0] * 2
    rpc.shutdown()
    os.write(1, f"rank {rank} done\\n".encode())  # whole lines, whoever else writes there
    """
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run_world(
    environments: list[dict[str, str]], code: str, tmp_path: Path, timeout: float = 90.0
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a process for each environment at the same time."""
    script = tmp_path / "member.py"
    script.write_text(code, encoding="utf-8")
    members = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    done = []
    try:
        for member in members:
            out, err = member.communicate(timeout=timeout)
            done.append(subprocess.CompletedProcess(member.args, member.returncode, out, err))
    finally:
        for member in members:
            if member.poll() is None:
                member.kill()
                member.communicate()
    return done


def test_a_world_from_the_environment(free_port: int, tmp_path: Path) -> None:
    """Rank 0 starts the broker at MASTER_ADDR and MASTER_PORT, and it goes with the world."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "WORLD_SIZE": "3"}
    done = run_world([{**common, "RANK": str(rank)} for rank in range(3)], MEMBER, tmp_path)
    for rank, member in enumerate(done):
        assert member.returncode == 0, member.stderr
        assert f"rank {rank} done" in member.stdout
    with pytest.raises(BrokerError):
        rpc.init_rpc(
            "late",
            broker=f"tcp://127.0.0.1:{free_port}",
            rpc_backend_options=rpc.BrokerRpcBackendOptions(connect_timeout=6.0),
        )


def test_torchrun(free_port: int, tmp_path: Path) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"),
            *("--master-port", str(free_port), str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "done" in line) == [
        f"rank {rank} done" for rank in range(3)
    ]


def test_a_world_that_is_not_complete_says_who_is_missing(own_cluster: Start) -> None:
    cluster = own_cluster(workers=0)
    rpc.shutdown()
    with pytest.raises(BrokerError, match=r"ranks \[1, 2\] of a world of 3 did not come"):
        rpc.init_rpc(
            "alone",
            rank=0,
            world_size=3,
            broker=f"{cluster.address}/world",
            rpc_backend_options=rpc.BrokerRpcBackendOptions(world_timeout=0.3),
        )
    assert not rpc._is_current_rpc_agent_set()
    rpc.init_rpc("client", broker=cluster.address)


def test_a_world_of_one(own_cluster: Start) -> None:
    cluster = own_cluster(workers=0)
    rpc.shutdown()
    rpc.init_rpc("only", rank=0, world_size=1, broker=f"{cluster.address}/one")
    assert rpc.rpc_sync("only", helpers.add, (1, 2)) == 3
    rpc.shutdown()
    rpc.init_rpc("client", broker=cluster.address)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2)])
def test_a_fixed_world_needs_a_rank_in_it(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"a fixed world of {size} needs a rank from 0 to 1"):
        rpc.init_rpc("w", rank=rank, world_size=size, broker="tcp://127.0.0.1:1")


def test_where_the_broker_is_first_match(
    own_cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = own_cluster(workers=1)
    rpc.shutdown()
    address, nowhere = cluster.address, "tcp://127.0.0.1:1"

    def joins(broker: str | None, init_method: str | None) -> None:
        options = rpc.BrokerRpcBackendOptions(init_method=init_method, connect_timeout=20.0)
        rpc.init_rpc("client", broker=broker, role=Role.CLIENT, rpc_backend_options=options)
        assert rpc.rpc_sync("worker0", helpers.who) == "worker0"
        rpc.shutdown()

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", address.rpartition(":")[2])
    joins(None, None)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TENSORPLAY_BROKER", address)
    joins(None, None)
    monkeypatch.setenv("TENSORPLAY_BROKER", nowhere)
    joins(None, address)
    joins(address, nowhere)
    rpc.init_rpc("client", broker=address)


def test_no_broker_given_starts_one_for_this_process() -> None:
    rpc.init_rpc("alone")
    try:
        address = rpc._get_current_rpc_agent().address.endpoint
        assert address.startswith("tcp://127.0.0.1:")
        assert rpc.rpc_sync("alone", helpers.add, (1, 2)) == 3
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_env_without_its_variables(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(missing)
    options = rpc.BrokerRpcBackendOptions(init_method="env://")
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        rpc.init_rpc("w", rpc_backend_options=options)


@pytest.mark.parametrize(
    ("init_method", "missing"),
    [
        ("tcp://127.0.0.1:1", "rank parameter missing"),
        ("env://", "environment variable RANK expected"),
    ],
)
def test_an_init_method_needs_a_rank(init_method: str, missing: str) -> None:
    options = rpc.BrokerRpcBackendOptions(init_method=init_method)
    with pytest.raises(ConfigError, match=f"{missing}.*broker="):
        rpc.init_rpc("w", rpc_backend_options=options)


def test_env_gives_rank_and_world_size(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    rpc.init_rpc("w", rpc_backend_options=rpc.BrokerRpcBackendOptions(init_method="env://"))
    try:
        assert rpc.get_worker_info().id == 0
        assert rpc._get_current_rpc_agent().world_size == 1
    finally:
        rpc.shutdown()


def test_a_broker_that_others_reach_is_not_started_by_accident(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "0.0.0.0")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"TENSORPLAY_CURVE_DIR.*TENSORPLAY_INSECURE=1"):
        rpc.init_rpc("w")
    monkeypatch.setenv("TENSORPLAY_INSECURE", "1")
    rpc.init_rpc("w")
    rpc.shutdown()


def test_a_broker_that_is_started_uses_the_keys_of_the_environment(
    free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (keys.BROKER_NAME, "w"):
        keys.create(tmp_path, name)
    keys.allow(tmp_path, "w")
    monkeypatch.setenv("TENSORPLAY_CURVE_DIR", str(tmp_path))
    monkeypatch.setenv("MASTER_ADDR", "0.0.0.0")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    rpc.init_rpc("w")
    try:
        keyless = rpc.BrokerRpcBackendOptions(curve_dir="", connect_timeout=1.0)
        stranger = Agent(
            "x", rpc._get_current_rpc_agent().address, role=Role.CLIENT, options=keyless
        )
        with pytest.raises(BrokerError, match="if the broker asks for keys"):
            stranger.start()
    finally:
        rpc.shutdown()


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="is no address of a broker"):
        rpc.init_rpc("w", broker="localhost:5555")


@pytest.mark.parametrize("form", ["ipc", "ipv6"])
def test_other_transports(form: str, tmp_path: Path, free_port: int) -> None:
    address = f"ipc://{tmp_path}/b.sock" if form == "ipc" else f"tcp://[::1]:{free_port}"
    broker = subprocess.Popen(
        [sys.executable, "-m", "tensorplay.broker", "--bind", address],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert broker.stdout is not None
        assert "ready" in broker.stdout.readline()
        rpc.init_rpc("client", broker=address)
        assert rpc.rpc_sync("client", helpers.add, (1, 2)) == 3
        rpc.shutdown()
    finally:
        broker.terminate()
        broker.wait(20)
        assert broker.stdout is not None
        broker.stdout.close()


def test_the_first_call_has_its_time_to_itself(own_cluster: Start) -> None:
    """What joining costs is not taken from the first call's time-out."""
    own_cluster(workers=1)
    assert rpc.rpc_sync("worker0", helpers.who, timeout=5) == "worker0"


def test_a_client_ends_without_waiting_for_what_workers_do(own_cluster: Start) -> None:
    cluster = own_cluster(workers=1)
    rpc.rpc_async("worker0", helpers.wait_event, ("long", 60.0))
    rpc.rpc_sync("worker0", helpers.who)
    started = time.monotonic()
    rpc.shutdown(graceful=False)
    assert time.monotonic() - started < 5
    rpc.init_rpc("client", broker=cluster.address)
    rpc.rpc_sync("worker0", helpers.set_event, ("long",))
