"""Check that the block of docs/first_run.md equals the text made from its record, character by character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import readme
from tools.lint.tree import ROOT, line_of, texts

PAGE = "docs/first_run.md"
FIGURES = ("decode_tokens_per_s", "prefill_tokens_per_s", "output_tokens_per_s")


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield a fault if the block differs from its record, and faults of printed figures that were not measured."""
    text = texts(root).get(PAGE, "")
    where, better = f"{PAGE}:{line_of(text, readme.BEGIN)}", "run `python -m tools.readme`"
    block = readme.block_of(text) if readme.BEGIN in text and readme.END in text else ""
    names = re.findall(r"record: `experiments/records/(first_light-[\d-]+\.json)`", block)
    if len(names) != 1 or not (readme.RECORDS / names[0]).is_file():
        yield f"{where}: the block names no record; {better}"
        return
    record = json.loads((readme.RECORDS / names[0]).read_text())
    if block != readme.block(record, names[0]):
        yield f"{where}: not what {names[0]} says; {better}"
    yield from (f"{where}: {fault}; {better}" for fault in unmeasured(record))


def unmeasured(record: dict[str, Any]) -> Iterator[str]:
    """Yield the figures of a record's summary that its printed text lacks or states differently."""
    summary, printed = record["summary"], " ".join(record["demo"]["printed"].split())
    for figure in FIGURES:
        if f"{summary[figure]:,.0f}" not in printed:
            yield f"{figure} is {summary[figure]:,.0f}, which was not printed"
    name = summary["backend"]["name"]
    if not name.startswith("mlir") or f"backend {name}" not in printed:
        yield f"backend {name!r} was not printed, or is not mlir"
    if "/tmp" in printed or ".venv/bin/workbench reproduce runs/" not in printed:
        yield "the command that reproduces the run is not one of the checkout"
