"""The documents as a reader sees them: fenced blocks with what was said about running them, and inline code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md"))
    if path.name != "CHANGELOG.md"  # of the past, not of what is there
)
# Before a fence: <!-- not run: why --> or <!-- run: slow -->.
_NOTE = re.compile(r"<!-- (not run: .+|run: slow) -->")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the fence, from 1
    language: str
    text: str
    note: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return not self.note.startswith("not run")

    @property
    def file(self) -> str | None:
        """The name of the file that this block is, if its first line says so in a comment."""
        first = re.match(r"# ([\w.-]+\.(?:py|yaml|jsonl|txt))\b", self.text)
        return first[1] if first else None


@cache
def blocks(language: str | None = None) -> tuple[Block, ...]:
    return tuple(block for page in PAGES for block in _read(page) if language in (None, block.language))


def _read(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    opened = 0
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if not opened:
            opened = number
            continue
        above = [text for text in lines[max(0, opened - 3) : opened - 1] if text.strip()]
        note = _NOTE.fullmatch(above[-1].strip()) if above else None
        text = "\n".join(lines[opened : number - 1]) + "\n"
        yield Block(page, opened, lines[opened - 1][3:].strip(), text, note[1] if note else "")
        opened = 0
    assert not opened, f"{page.name}:{opened}: a block that does not end"


def inline_code() -> Iterator[tuple[str, str]]:
    """(place, text) of every `code` outside of blocks."""
    for page in PAGES:
        inside = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            if line.startswith("```"):
                inside = not inside
            elif not inside:
                for text in re.findall(r"`([^`]+)`", line):
                    yield f"{page.relative_to(ROOT)}:{number}", text
