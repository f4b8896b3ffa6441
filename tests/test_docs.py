"""The pages of docs/ read well as text: lines of at most 120 columns, no doubled blank line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


def problems(text: str) -> list[str]:
    """Return the lines of prose that are too long, and doubled blank lines; tables and code are left as they are."""
    prose = re.sub(r"^```.*?^```$", "```", text, flags=re.M | re.S)
    lines = prose.splitlines()
    found = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    return found + ["two blank lines" for one, two in zip(lines, lines[1:], strict=False) if one == two == ""]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_reads_well_as_text(page: Path) -> None:
    assert problems(page.read_text(encoding="utf-8")) == []


def test_the_check_can_fail() -> None:
    long = "x" * 121
    assert problems(f"{long}\n\n\n|{long}|\n```\n{long}\n\n\n```\n") == [long, "two blank lines"]
