"""The pages of docs/ read well as text, and their Python runs. tests/fresh_environment.py runs their commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name not in ("reference", "project")]
PAGES = [ROOT / "README.md", *WRITTEN]


def python_of(page: str) -> str:
    """Return a page's Python in order, but files that its commands read (`# mine.py`) and lines that name the reader's
    own runs."""
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    lines = "\n".join(block for block in blocks if not block.startswith("# mine.py")).splitlines()
    return "\n".join(line for line in lines if '"runs/' not in line)


def problems(text: str) -> list[str]:
    """Return the lines of prose that are too long, and doubled blank lines; tables and code are left as they are."""
    prose = re.sub(r"^```.*?^```$", "```", text, flags=re.M | re.S)
    lines = prose.splitlines()
    found = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    return found + ["two blank lines" for one, two in zip(lines, lines[1:], strict=False) if one == two == ""]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_reads_well_as_text(page: Path) -> None:
    assert problems(page.read_text(encoding="utf-8")) == []


@pytest.mark.sampled(9)
@pytest.mark.parametrize("page", [each for each in PAGES if python_of(each.read_text())], ids=lambda page: page.name)
def test_a_pages_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace a page, as a reader has it who runs its blocks in order."""
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(page.read_text()), page.name, "exec"), {"__name__": "docs"})


def test_the_check_can_fail() -> None:
    long = "x" * 121
    assert problems(f"{long}\n\n\n|{long}|\n```\n{long}\n\n\n```\n") == [long, "two blank lines"]
