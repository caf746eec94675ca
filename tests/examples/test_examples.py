"""Every example runs, alone and with workers that run already, and does what it claims."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tensorplay.cluster import ForkServerClient, LocalCluster, local_cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Tells the processes of one run from all others.
MARK = "TENSORPLAY_TEST_RUN"

SMALL = {
    "batch_async_execution.py": ("--steps", "25", "--trainers", "2"),
    "checkpoint_resume.py": ("--steps", "6", "--stop-after", "3"),
    "ddp_with_rpc.py": ("--steps", "8"),
    "parameter_server.py": ("--steps", "25"),
    "pipeline_resnet.py": ("--steps", "5", "--batch", "16"),
    "reinforcement_learning.py": ("--rounds", "10"),
    "rnn_embedding_server.py": ("--epochs", "2"),
}
TINY = {
    "batch_async_execution.py": ("--steps", "2", "--trainers", "2"),
    "ddp_with_rpc.py": ("--steps", "2"),
    "parameter_server.py": ("--steps", "2"),
    "pipeline_resnet.py": ("--steps", "1", "--batch", "8"),
    "reinforcement_learning.py": ("--rounds", "1"),
    "rnn_embedding_server.py": ("--epochs", "1", "--vocabulary", "10"),
}


def run(*command: str) -> str:
    """Runs a command, checks that it succeeds and leaves no process, and returns its output."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES.parent,
        env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    left = [process for process in psutil.process_iter() if _mark(process) == mark]
    _, alive = psutil.wait_procs(left, timeout=10)  # what ends with its parent, does so soon
    assert not alive, f"{command} left {alive}"
    return done.stdout


def _mark(process: psutil.Process) -> str | None:
    try:
        environment: dict[str, str] = process.environ()
    except psutil.Error:
        return None
    return environment.get(MARK)


def example(name: str, *arguments: str) -> str:
    return run(str(EXAMPLES / name), *arguments)


def loss_falls(output: str, *, to: float = 0.9) -> None:
    found = re.search(r"loss at first ([\d.]+), in the end ([\d.]+)", output)
    assert found is not None, output
    assert float(found[2]) < to * float(found[1]), output


def difference(output: str) -> float:
    found = re.search(r"largest difference .*: ([\d.e+-]+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


def test_all_examples_are_here_and_in_the_table() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == {*SMALL, "torchrun_world.py", "dask_workers.py", "ray_workers.py"}
    table = re.findall(r"\| \[`(\w+\.py)`\]\(\1\)", (EXAMPLES / "README.md").read_text("utf-8"))
    assert set(table) == files


@pytest.mark.parametrize("name", ["batch_async_execution.py", "rnn_embedding_server.py"])
def test_the_loss_falls(name: str) -> None:
    loss_falls(example(name, *SMALL[name]))


@pytest.mark.parametrize("door", ["contexts", "plain"])
def test_the_loss_falls_through_both_doors(door: str) -> None:
    loss_falls(example("parameter_server.py", *SMALL["parameter_server.py"], "--door", door))


def test_the_cut_of_the_batch_does_not_change_the_loss() -> None:
    output = example("pipeline_resnet.py", *SMALL["pipeline_resnet.py"])
    loss_falls(output)
    assert difference(output) < 1e-5


def test_data_parallel_trainers_have_the_losses_of_one_process() -> None:
    output = example("ddp_with_rpc.py", *SMALL["ddp_with_rpc.py"])
    loss_falls(output)
    assert difference(output) < 1e-5


def test_the_agent_learns() -> None:
    output = example("reinforcement_learning.py", *SMALL["reinforcement_learning.py"])
    found = re.search(r"at first for ([\d.]+) steps, in the end for ([\d.]+)", output)
    assert found is not None, output
    assert float(found[2]) > 1.5 * float(found[1]), output


def test_a_training_is_resumed() -> None:
    output = example("checkpoint_resume.py", *SMALL["checkpoint_resume.py"])
    assert "stopped and resumed" in output


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_world_under_torchrun(elastic: bool, free_port: int) -> None:
    output = run(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", str(free_port)),
        str(EXAMPLES / "torchrun_world.py"),
        *(["--elastic"] if elastic else []),
    )
    if not elastic:
        loss_falls(output)
        return
    worlds = re.findall(r"^(.+): the sum is 499500$", output, re.MULTILINE)
    assert worlds == ["worker0, worker1", "worker0, worker1, worker2", "worker0, worker1"]


@pytest.fixture(scope="module")
def workers(fork_server: ForkServerClient) -> Iterator[LocalCluster]:
    names = ["worker0", "worker1", "server", "trainer0", "trainer1"]
    with local_cluster(names, fork_server=fork_server) as running:
        yield running


@pytest.mark.parametrize("name", sorted(TINY))
def test_with_workers_that_run_already(name: str, workers: LocalCluster) -> None:
    example(name, *TINY[name], "--broker", workers.address)
    assert workers.exit_codes == {}
