"""``deploy/slurm/tensorplay.sbatch``: under a stand-in for srun, and under Slurm itself."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.following import PATIENCE, Follower

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = ROOT / "deploy" / "slurm" / "tensorplay.sbatch"
TRAIN = HERE / "train.py"
TASKS = 2


def environment(folder: Path) -> dict[str, str]:
    """Returns that of a job whose commands are those of this Python."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("python", "tensorplay"):
        module = ["-c", "from tensorplay.cli import main; main()"] if name == "tensorplay" else []
        arguments = " ".join(f"'{argument}'" for argument in [sys.executable, *module])
        (tools / name).write_text(f'#!/bin/sh\nexec {arguments} "$@"\n', encoding="utf-8")
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "TENSORPLAY_HOST": "127.0.0.1",
    }


class TestAStandIn:
    """The script with a ``srun`` that starts the tasks on this machine."""

    @pytest.fixture
    def variables(self, tmp_path: Path) -> dict[str, str]:
        given = environment(tmp_path)
        shutil.copy(HERE / "srun", tmp_path / "bin")
        job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": str(TASKS), "TENSORPLAY_SHARED": str(tmp_path)}
        return given | job

    @pytest.fixture
    def start(self, variables: dict[str, str]) -> Iterator[list[Follower]]:
        followers: list[Follower] = []
        yield followers
        for follower in followers:
            follower.close()

    def test_all_tasks_are_workers(
        self, variables: dict[str, str], tmp_path: Path, start: list[Follower]
    ) -> None:
        job = Follower([str(SCRIPT), "python", str(TRAIN), "3"], variables)
        start.append(job)
        assert job.end(PATIENCE) == 3, job.output
        assert f"{TASKS} tasks were called" in job.output
        assert not list(tmp_path.glob(".tensorplay-*"))  # the keys are gone

    def test_it_ends_all_when_it_is_told(
        self, variables: dict[str, str], tmp_path: Path, start: list[Follower]
    ) -> None:
        job = Follower([str(SCRIPT), "sleep", "100"], variables)
        start.append(job)
        job.expect("worker1")  # is ready
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) >= TASKS + 2
        job.signal(signal.SIGTERM)
        assert job.end(PATIENCE) == 143
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        assert not list(tmp_path.glob(".tensorplay-*"))

    def test_without_a_command_it_says_how_it_is_used(self, variables: dict[str, str]) -> None:
        done = subprocess.run(
            [SCRIPT], env=variables, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 2
        assert "usage: sbatch" in done.stderr


_DAEMONS = [shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("slurmctld", "slurmd")]
_REASON = (
    "Slurm is not installed"
    if None in _DAEMONS
    else "needs root, to run jobs"
    if os.geteuid() != 0
    else None
)

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
KillWait=2
ReturnToService=2
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName=localhost CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
class TestSlurm:
    """The script as a job of a cluster of one node."""

    @pytest.fixture
    def variables(self, tmp_path: Path) -> Iterator[dict[str, str]]:
        text = CONFIGURATION.format(controller=free_port(), node=free_port(), folder=tmp_path)
        settings = tmp_path / "slurm.conf"
        settings.write_text(text, encoding="utf-8")
        for name in ("state", "spool"):
            (tmp_path / name).mkdir()
        variables = {**environment(tmp_path), "SLURM_CONF": str(settings)}
        daemons = [
            Follower([str(daemon), "-D", *options], variables)
            for daemon, options in zip(_DAEMONS, (["-i"], ["-N", "localhost"]), strict=True)
        ]
        yield variables
        for daemon in reversed(daemons):
            daemon.signal(signal.SIGTERM)
            daemon.close()

    def test_a_job_trains(self, variables: dict[str, str], tmp_path: Path) -> None:
        wait_for_node(variables)
        output = tmp_path / "output"
        done = subprocess.run(
            [
                *("sbatch", "--wait", "--ntasks", str(TASKS), "--output", str(output)),
                *(f"--chdir={tmp_path}", str(SCRIPT), "python", str(TRAIN)),
            ],
            env=variables,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
        )
        said = output.read_text(encoding="utf-8") if output.exists() else ""
        assert done.returncode == 0, f"{done.stderr}\n{said}"
        assert f"{TASKS} tasks were called" in said


def wait_for_node(variables: dict[str, str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        told = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env=variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if told.stdout.strip() == "idle":
            return
        assert time.monotonic() < deadline, f"{told.stdout} {told.stderr}"
        time.sleep(0.2)
