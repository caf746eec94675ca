"""The site is built without a warning, has every page, and asks nobody else for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT

pytest.importorskip("mkdocs", reason="the site needs: pip install '.[docs]'")
pytest.importorskip("mkdocstrings", reason="the site needs: pip install '.[docs]'")

#: What a browser loads by itself, as opposed to a link that a reader may follow.
_LOADED = re.compile(
    r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)", re.IGNORECASE
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        outside = [url for url in _LOADED.findall(text) if re.match(r"(?:https?:)?//", url)]
        assert not outside, page
        assert 'class="mermaid"' not in text, "its script comes from elsewhere: draw an SVG"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("rpc", ["init_rpc", "rpc_sync", "RRef", "BrokerRpcBackendOptions"]),
        ("nn", ["RemoteModule", "remote_parameters", "clip_grad_norm_"]),
        ("autograd", ["backward", "get_gradients"]),
        ("optim", ["DistributedOptimizer", "step"]),
        ("cluster", ["local_cluster", "LocalCluster", "WorkerConfig"]),
        ("broker", ["BrokerConfig", "heartbeat_timeout"]),
        ("errors", ["WorkerLostError", "RpcTimeoutError"]),
    ],
)
def test_the_reference_has_the_docstrings(site: Path, page: str, names: list[str]) -> None:
    text = (site / "api" / f"{page}.html").read_text(encoding="utf-8")
    for name in names:
        assert name in text


def test_the_changes_are_those_of_the_repository(site: Path) -> None:
    assert "registration by name and rank" in (site / "changelog.html").read_text(encoding="utf-8")
