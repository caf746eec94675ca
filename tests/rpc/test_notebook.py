"""What a notebook shows of an exception that a function of one of its cells raises remotely."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("IPython", reason="IPython is not installed")

NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("colors", "nocolor")
shell.run_cell('''
import tensorplay, torch
from tensorplay.distributed import rpc

session = tensorplay.local_cluster(workers=1)
session.__enter__()

def inner(x):
    return torch.linalg.inv(x[:1])  # not square

def outer(x):
    return inner(x)
''')
shell.run_cell("rpc.rpc_sync('worker0', outer, args=(torch.ones(2, 2),))")
shell.run_cell("session.__exit__(None, None, None)")
"""


def test_the_cells_frames_are_shown_with_their_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NOTEBOOK)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "RuntimeError: linalg.inv" in shown
    assert "On worker 'worker0':" in shown
    assert "in outer(" in shown
    assert "return inner(x)" in shown, "the lines of the cell are there"
    assert "return torch.linalg.inv(x[:1])  # not square" in shown
