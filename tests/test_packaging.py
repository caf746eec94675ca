"""What is packaged, and that it is imported under one name only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tensorplay

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_list_is_the_tree() -> None:
    found = {
        str(init.parent.relative_to(ROOT)).replace("/", ".")
        for init in (ROOT / "tensorplay").rglob("__init__.py")
    }
    found.add("tensorplay.broker")  # behind a link, which not every walk follows
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_the_broker_lies_at_the_top_and_is_linked() -> None:
    assert (ROOT / "broker" / "__init__.py").is_file()
    assert (ROOT / "tensorplay" / "broker").resolve() == ROOT / "broker"
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"tensorplay.broker": "broker"}


def test_the_broker_cannot_be_imported_a_second_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import broker"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "tensorplay.broker" in done.stderr


def test_the_wheel_holds_what_the_tree_does(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("broker", "tensorplay"):
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tree = {path.relative_to(copy) for path in (copy / "tensorplay").rglob("*.py")}
    tree |= {Path("tensorplay") / path.relative_to(copy) for path in copy.glob("broker/*.py")}
    tree |= {
        Path("tensorplay") / path.relative_to(copy) for path in copy.glob("broker/dashboard/*")
    }
    assert packed == {path.as_posix() for path in tree} | {"tensorplay/py.typed"}


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == tensorplay.__version__
    assert f"## {tensorplay.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_distribution_is_not_to_be_uploaded() -> None:
    assert PROJECT["project"]["name"] == "tensorplay-broker"
    assert "Private :: Do Not Upload" in PROJECT["project"]["classifiers"]


def test_every_dependency_is_explained() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for requirement in PROJECT["project"]["dependencies"]:
        name = requirement.split(">")[0]
        assert f"| `{name}` |" in page, f"docs/architecture.md does not say why {name} is there"


def test_names_resolve_to_torch() -> None:
    import torch

    assert tensorplay.Tensor is torch.Tensor
    assert tensorplay.device is torch.device
    assert tensorplay.compile is torch.compile
    assert tensorplay.float32 is torch.float32
    assert tensorplay.nn.Module is torch.nn.Module
    with pytest.raises(AttributeError, match="neither tensorplay nor torch"):
        tensorplay.no_such_name  # noqa: B018
