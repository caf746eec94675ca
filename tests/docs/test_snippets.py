"""Every snippet and command of the documentation runs as printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import snippets

WITH_PYTHON = [page for page in snippets.pages() if snippets.blocks(page, "python")]
CONSOLE = [block for page in snippets.pages() for block in snippets.blocks(page, "console")]


def _environment() -> dict[str, str]:
    tools = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(snippets.program(page), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{page}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: f"{block.page}:{block.line}")
def test_a_command_runs(block: snippets.Block, tmp_path: Path) -> None:
    commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    assert commands, "a console block shows its commands behind '$ '"
    for name, text in snippets.files(snippets.ROOT / block.page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-euc", "\n".join(commands)],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{block}:\n{done.stdout}\n{done.stderr}"
