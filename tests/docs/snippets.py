"""Finds the code blocks of the documentation.

Blocks of a page that are marked ``python`` form one program, run from top to bottom; a
``console`` block holds commands behind ``$``, whose output follows them.  A block whose fence
says ``python NAME.py`` is a file, which the page's commands find.  A block behind the comment
``<!-- not run: reason -->`` is for reading only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+-->\n+)?"
    r"^```(?P<language>\w+)(?: (?P<file>[\w.]+))?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: Path of the page, relative to the repository.
        line: Line of the page at which the code begins.
        language: What stands behind the fence.
        text: The code.
    """

    page: str
    line: int
    language: str
    text: str


def pages() -> list[Path]:
    """Returns every page of the documentation, and the README."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[Block]:
    """Returns the blocks of a page that are to be run."""
    source = page.read_text(encoding="utf-8")
    return [
        Block(
            str(page.relative_to(ROOT)),
            source.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
        )
        for match in _BLOCK.finditer(source)
        if match["language"] == language and not match["skip"] and not match["file"]
    ]


def files(page: Path) -> dict[str, str]:
    """Returns the files that a page shows, by name."""
    source = page.read_text(encoding="utf-8")
    return {match["file"]: match["text"] for match in _BLOCK.finditer(source) if match["file"]}


def program(page: Path) -> str:
    """Returns the Python blocks of a page as one program whose line numbers are the page's."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"
