"""Check that every measured figure in README, docs/ and the notebooks names the record that contains it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tools.lint.tree import ROOT, line_of, texts

RECORDS = ROOT / "experiments" / "records"
# Simulated figures, which tools/lint/scale.py holds.
UNMEASURED = ("docs/scale.md",)
NAMED = re.compile(r"[a-z][\w.]*(?:-[\w.]+)*?-\d{8}-\d{6}(?:-\d+)?(?=[^-\w]|$)")
NUMBER = r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.,-])\d+(?:\.\d+)?"
UNIT = (
    r"tokens/s|tokens a second|milliseconds|seconds|microseconds|ms|us|µs|s|%|GB/s|GFLOP/s|MB|MiB|GB|GiB|times|x faster"
)
MEASURED = re.compile(rf"({NUMBER})(?:\s?(?:{UNIT})(?![\w/])|\s(?:of\s[A-Z]|output tokens/s))")
PRECISE = re.compile(rf"({NUMBER})")
SCALES = [10.0**power for power in (-9, -6, -3, 0, 2, 3, 6)]  # of units: GB of bytes, %, ms of seconds, ...


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield figures without a record, and named records that do not exist or do not contain the figure."""
    for path, text in texts(root).items():
        if path.startswith("notebooks/") and path.endswith(".py"):
            prose = prose_of(text)
        elif path == "README.md" or (path.startswith("docs/") and path.endswith(".md")):
            prose = text
        else:
            continue
        if not path.startswith(UNMEASURED):
            yield from (f"{path}:{line_of(text, where)}: {fault}" for where, fault in _faults(prose))


def _faults(text: str) -> Iterator[tuple[str, str]]:
    """Yield (a line of the text, the fault)."""
    for paragraph in paragraphs(text):
        prose, _, block = paragraph.partition("```")
        figures = MEASURED.findall(re.sub(r"`[^`]*`", "", prose))
        if block:
            figures += [each for each in PRECISE.findall(block) if "." in each or "," in each]
            figures += MEASURED.findall(block)
        names = [name for name in NAMED.findall(paragraph) if not name.startswith("runs/") and kept(name)]
        where = next((line for figure in figures[:1] for line in paragraph.splitlines() if figure in line), "")
        if figures and not names:
            yield where, f"{figures[0]}: no record is named; name one of experiments/records beside it"
        for figure in dict.fromkeys(figures if names else ()):
            if not any(follows(figure, name) for name in names):
                yield where, f"{figure}: not in {', '.join(names)}; write what the record holds"
    for name in re.findall(r"experiments/records/([\w.-]+)\.json", text):
        if not kept(name):
            yield name, f"{name}: there is no such record; name one of experiments/records"


def paragraphs(text: str) -> Iterator[str]:
    """Yield each paragraph together with the output block after it; commands and code are left out."""
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
def held(name: str) -> tuple[frozenset[float], str]:
    """Return the numbers of a record with their ratios, and its text without commas between digits.

    A ratio is of two figures of one object, or of the speeds of two rows with the same work and format.
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
    """Return whether a record contains a figure, or a number that rounds to it at the figure's number of digits."""
    plain = figure.replace(",", "")
    numbers, words = held(name)
    if re.search(rf"(?<![\d.]){re.escape(plain)}(?![\d.]*\d)", words):
        return True
    digits = len(plain.partition(".")[2])
    return any(f"{number * scale:.{digits}f}" == plain for number in numbers for scale in SCALES)


def kept(name: str) -> bool:
    return (RECORDS / f"{name}.json").is_file()
