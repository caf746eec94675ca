"""What docs/kubernetes.md prints is what the tests run."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from tests.docs.snippets import ROOT
from tests.kubernetes.rendering import KEY_COMMANDS, OVERLAYS, TOKEN_COMMAND

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def test_the_commands_that_make_keys_are_those_of_the_tests() -> None:
    assert KEY_COMMANDS + TOKEN_COMMAND in PAGE
    assert "TENSORPLAY_CURVE_DIR=deploy/kubernetes/base/keys" in PAGE


def test_every_folder_is_described() -> None:
    for overlay in OVERLAYS:
        assert f"| `{overlay}` |" in PAGE
