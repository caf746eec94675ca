"""``python -m tests.conformance``: runs the suite and compares with what is to be expected.

The harness is not part of this repository. It is looked for in ``../shared/conformance`` and
in the folder that the variable TENSORPLAY_CONFORMANCE names.

    python -m tests.conformance            all public tests (a few minutes)
    python -m tests.conformance --fast     a selection
    python -m tests.conformance --only REGEX

The known differences (``differences.py``) are left out. Exits with 1 if any other test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance.differences import DIFFERENCES, FAST

ROOT = Path(__file__).parents[2]
PASSED = ("pass", "skip")


def harness() -> Path:
    """Returns the folder of the harness, or ends the program where there is none."""
    named = os.environ.get("TENSORPLAY_CONFORMANCE")
    folder = Path(named) if named else ROOT.parent / "shared" / "conformance"
    if not (folder / "run_conformance.py").is_file():
        print(f"no conformance harness in {folder}; name one in TENSORPLAY_CONFORMANCE")
        sys.exit(0)
    return folder


def run(folder: Path, only: str, jobs: int) -> dict[str, str]:
    """Runs the tests and returns the outcome of each."""
    skipped = "|".join(re.escape(test) + "$" for test in DIFFERENCES)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        runner = str(Path(__file__).with_name("runner.py"))
        command = [sys.executable, runner, str(folder / "run_conformance.py")]
        command += [
            "--target",
            "tensorplay",
            "--category",
            "public",
            "--json",
            str(report),
            "-j",
            str(jobs),
            "-q",
        ]
        command += ["--retries", "0", "--skip", skipped, *(["--only", only] if only else [])]
        environment = {
            **os.environ,
            # The address that stands for a test's file://.
            "CONF_INIT_TEMPLATE": "tcp://127.0.0.1:{port}/{ns}",
            # The DDP tests rely on every process having its group as soon as one has.
            "TORCH_DIST_INIT_BARRIER": "1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        subprocess.run(command, env=environment, cwd=scratch, check=False)
        tests = json.loads(report.read_text(encoding="utf-8"))["tests"]
    return {test: outcome["status"] for test, outcome in tests.items()}


def main() -> int:
    """Runs what the command line asks for and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("--fast", action="store_true", help="a selection of a few minutes")
    parser.add_argument("--only", default="", help="a pattern searched in the test ids")
    parser.add_argument("-j", type=int, default=3, help="tests at a time")
    asked = parser.parse_args()
    outcomes = run(harness(), FAST if asked.fast else asked.only, asked.j)
    failed = sorted(test for test, outcome in outcomes.items() if outcome not in PASSED)
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    for test in failed:
        print(f"  {outcomes[test]}: {test}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
