"""The tests that the page on guarantees names are there."""

from __future__ import annotations

import re

import pytest

from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "guarantees.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/.]+?\.py)(?:::(\w+))?`", PAGE.read_text("utf-8"))))


def test_it_names_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "test"), NAMED, ids="::".join)
def test_a_test_that_is_named_is_there(file: str, test: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert f"def {test}(" in source if test else re.search("def test|TestCase", source)
