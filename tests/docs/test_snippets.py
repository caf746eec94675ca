"""Every snippet and command of the documentation runs as printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.docs import snippets

WITH_PYTHON = [page for page in snippets.pages() if snippets.blocks(page, "python")]
CONSOLE = [block for page in snippets.pages() for block in snippets.blocks(page, "console")]


#: Ports that the pages print; each run takes free ones instead, so that runs do not collide.
_PORT = re.compile(r"\b(5555|295\d\d)\b")


def _environment() -> dict[str, str]:
    tools = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _run(command: list[str], folder: Path) -> str:
    """Runs a command, fails the test if it does, and ends whatever it has started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(snippets.program(page), encoding="utf-8")
    _run([sys.executable, str(script)], tmp_path)


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: f"{block.page}:{block.line}")
def test_a_command_runs(block: snippets.Block, tmp_path: Path) -> None:
    commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    assert commands, "a console block shows its commands behind '$ '"
    ports: defaultdict[str, str] = defaultdict(_free_port)

    def free(text: str) -> str:
        return _PORT.sub(lambda match: ports[match[0]], text)

    for name, text in snippets.files(snippets.ROOT / block.page).items():
        (tmp_path / name).write_text(free(text), encoding="utf-8")
    _run(["bash", "-euc", free("\n".join(commands))], tmp_path)
