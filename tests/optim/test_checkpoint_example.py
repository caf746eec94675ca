"""The example that stops a training and resumes it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoint_resume.py"


@pytest.mark.timeout(120)
def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    without_stop, with_stop = example["main"](6, 3)
    assert with_stop == pytest.approx(without_stop, rel=1e-4)
    assert without_stop[-1] < without_stop[0]
    assert "stopped and resumed" in capsys.readouterr().out
