"""Every figure of a measurement in README, docs/ and the notebooks names the record that it comes from."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "experiments" / "records"
NAMED = re.compile(r"[a-z][\w.]*(?:-[\w.]+)*?-\d{8}-\d{6}(?:-\d+)?(?=[^-\w]|$)")
NUMBER = r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.,-])\d+(?:\.\d+)?"
UNIT = (
    r"tokens/s|tokens a second|milliseconds|seconds|microseconds|ms|us|µs|s|%|GB/s|GFLOP/s|MB|MiB|GB|GiB|times|x faster"
)
MEASURED = re.compile(rf"({NUMBER})(?:\s?(?:{UNIT})(?![\w/])|\s(?:of\s[A-Z]|output tokens/s))")
PRECISE = re.compile(rf"({NUMBER})")
SCALES = [10.0**power for power in (-9, -6, -3, 0, 2, 3, 6)]  # of units: GB of bytes, %, ms of seconds, ...


def paragraphs(text: str) -> Iterator[str]:
    """Each paragraph, with the block of output that follows it; commands and code are no prose."""
    last = ""
    for piece in re.split(r"(```\w*\n.*?\n```)", text, flags=re.DOTALL):
        if piece.startswith("```"):
            if piece.startswith("```\n") and MEASURED.search(piece):
                yield f"{last}\n{piece}"
                last = ""
            continue
        if last:
            yield last
        *before, last = re.split(r"\n\s*\n", piece.strip())
        yield from before
    yield last


def prose_of(notebook: str) -> str:
    cells = re.split(r"^# %%", notebook, flags=re.MULTILINE)
    return "\n\n".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells if " [markdown]" in cell[:12])


@cache
def texts() -> dict[str, str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.parent.name != "reference"]  # settings, made from code: nothing is measured
    pages.remove(ROOT / "docs" / "scale.md")  # simulated; tests/test_scale_page.py runs its commands and compares
    found = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages}
    for file in sorted((ROOT / "notebooks").glob("*.py")):
        found[f"notebooks/{file.name}"] = prose_of(file.read_text(encoding="utf-8"))
    return found


@cache
def held(name: str) -> tuple[frozenset[float], str]:
    """The numbers of a record, the ratios that follow from it, and its words without commas between digits.

    A ratio is of two figures of one object, or of one figure in two rows that are of the same work and format.
    """
    record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    numbers: set[float] = set()
    words = json.dumps(record, ensure_ascii=False)
    for each in objects(record):
        own = [float(v) for v in each.values() if isinstance(v, int | float) and not isinstance(v, bool) and v]
        numbers |= {*own, *(a / b for a, b in itertools.permutations(own[:40], 2))}
    rows: dict[Any, list[float]] = {}
    for row in record.get("rows", ()):
        if isinstance(row.get("tokens_per_s"), float):
            rows.setdefault((row.get("work"), row.get("format")), []).append(row["tokens_per_s"])
    numbers |= {a / b for alike in rows.values() for a, b in itertools.permutations(alike, 2)}
    return frozenset(numbers), re.sub(r"(?<=\d),(?=\d)", "", words)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inside in value.values():
            yield from objects(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from objects(inside)


def follows(figure: str, name: str) -> bool:
    """Return True if the record holds the figure, or a number that rounds to it in the digits written."""
    plain = figure.replace(",", "")
    numbers, words = held(name)
    if re.search(rf"(?<![\d.]){re.escape(plain)}(?![\d.]*\d)", words):
        return True
    digits = len(plain.partition(".")[2])
    return any(f"{number * scale:.{digits}f}" == plain for number in numbers for scale in SCALES)


def problems(text: str) -> list[str]:
    """Return the faults of a text: figures without a record, records that are absent or do not hold the figure."""
    found = []
    for paragraph in paragraphs(text):
        prose, fence, block = paragraph.partition("```")
        figures = MEASURED.findall(re.sub(r"`[^`]*`", "", prose))
        if block:
            figures += [each for each in PRECISE.findall(block) if "." in each or "," in each]
            figures += MEASURED.findall(block)
        if not figures:
            continue
        names = [name for name in NAMED.findall(paragraph) if not name.startswith("runs/") and kept(name)]
        if not names:
            found.append(f"{figures[0]}: no record is named beside it: {' '.join(paragraph.split())[:80]}")
        for figure in dict.fromkeys(figures):
            if names and not any(follows(figure, name) for name in names):
                found.append(f"{figure}: not in {', '.join(names)}")
    for name in re.findall(r"experiments/records/([\w.-]+)\.json", text):
        if not kept(name):
            found.append(f"{name}: there is no such record")
    return found


def kept(name: str) -> bool:
    return (RECORDS / f"{name}.json").is_file()


@pytest.mark.parametrize("name", texts())
def test_every_figure_names_its_record(name: str) -> None:
    assert problems(texts()[name]) == []


RECORD = "first_light-20261121-102004"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It decodes 1,142 tokens/s here.", "1,142: no record is named"),
        ("It is 1.38 times as fast.", "1.38: no record is named"),
        (f"It decodes 1,143 tokens/s (`{RECORD}`).", f"1,143: not in {RECORD}"),
        (f"It decodes 1,142 tokens/s (`{RECORD}`).", None),
        (f"It takes 6.79 ms (`experiments/records/{RECORD}.json`).", None),
        (f"It prints (`{RECORD}`):\n\n```\nTTFT 6.78\n1,064 tokens/s\n```\n", f"6.78: not in {RECORD}"),
        (f"It prints (`{RECORD}`):\n\n```\nTTFT 6.79\n1,064 tokens/s\n```\n", None),
        ("It prints:\n\n```\nTTFT 6.79\n1,064 tokens/s\n```\n", "6.79: no record is named"),
        ("See `experiments/records/none-20260101-000000.json`.", "none-20260101-000000: there is no such record"),
        (f"See `{RECORD}`.\n\nIt takes 120.15 ms.", "120.15: no record is named"),
        ("```\nworkbench generate --max-tokens 96 --temperature 0.8\n```\nand four times as much", None),
    ],
)
def test_what_is_wrong_is_found(text: str, message: str | None) -> None:
    found = problems(text)
    assert not found if message is None else len(found) == 1 and found[0].startswith(message)
