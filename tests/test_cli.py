"""The command ``tensorplay``."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

import tensorplay
from tensorplay.cli import main


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_names_every_command(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    for command in ("broker", "worker", "demo"):
        assert command in result.output


@pytest.mark.parametrize("command", ["broker", "worker", "demo"])
def test_help_of_a_command(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert "Exit codes" in result.output
    assert "TENSORPLAY_" in result.output


def test_version() -> None:
    assert tensorplay.__version__ in CliRunner().invoke(main, ["--version"]).output


def test_an_unknown_command_is_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["no-such-command"])
    assert result.exit_code == 2
    assert "no-such-command" in result.output


def test_asking_for_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom tensorplay.cli import main\n"
        "main(['worker', '--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--broker"),
        (["--broker", "tcp://127.0.0.1:1"], "--name"),
        (["--broker", "tcp://127.0.0.1:1", "--name", "w", "--rank", "-2"], "-2"),
        (["--broker", "tcp://127.0.0.1:1", "--name", "w", "--threads", "0"], "0"),
    ],
)
def test_wrong_usage_of_the_worker(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(main, ["worker", *arguments])
    assert result.exit_code == 2
    assert told in result.output


def test_options_come_from_the_environment() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensorplay.worker"],
        env={
            "TENSORPLAY_BROKER": "nowhere",
            "TENSORPLAY_NAME": "w",
            "PATH": "",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "'nowhere' is no address of a broker" in done.stderr
