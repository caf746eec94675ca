"""The documentation's record of torch's suite agrees with the list that is used."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.differences import DIFFERENCES, FAST

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")


def test_every_difference_is_in_the_docs_with_its_reason() -> None:
    rows = dict(re.findall(r"^\| `(\w+\.\w+)` \| (.+) \|$", PAGE, re.MULTILINE))
    assert rows == DIFFERENCES


def test_the_number_in_the_docs_is_that_of_the_list() -> None:
    passed, total = map(int, re.findall(r"\*\*(\d+) of (\d+)\*\*", PAGE)[0])
    assert passed == total - len(DIFFERENCES)


def test_the_fast_selection_is_a_pattern() -> None:
    assert re.search(FAST, "RpcTest.test_add")
    assert not re.search(FAST, "RpcTest.test_wait_all_exit_early_python")
