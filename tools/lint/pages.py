"""Check that README and the pages of docs/ are readable as plain text, and name every model family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT, line_of, pages
from workbench.model.hf.families import FAMILIES

MAX_COLUMNS, MAX_README_LINES = 120, 150
GUIDE = "docs/guide/python.md"  # lists the families
LISTED = re.compile(r"Families that are read.*?: (.*?)\. What a\s+config", re.DOTALL)


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield lines of prose that are too long, doubled blank lines, a README that has grown, and families that are not
    named."""
    for path, text in pages(root).items():
        whole = path == "README.md"  # its tables and blocks too
        fences = re.compile(r"^```.*?^```$", re.M | re.S)
        prose = text if whole else fences.sub(lambda block: re.sub(r"^.*$", "`", block[0], flags=re.M), text)
        last = None
        for number, line in enumerate(prose.splitlines(), 1):
            if len(line) > MAX_COLUMNS and (whole or not line.startswith("|")):
                yield f"{path}:{number}: {len(line)} characters; break it at {MAX_COLUMNS}"
            if line == last == "":
                yield f"{path}:{number}: two blank lines; one"
            last = line
        if whole and text.count("\n") > MAX_README_LINES:
            yield f"{path}:1: {text.count(chr(10))} lines; at most {MAX_README_LINES}"
    guide = pages(root).get(GUIDE, "")
    found = LISTED.search(guide)
    listed = re.sub(r"with\s+(mixtures\s+of\s+experts|recurrent\s+states):", "", found[1] if found else "")
    for name in FAMILIES.keys() ^ set(re.findall(r"[a-z0-9_]+", listed)):
        yield f"{GUIDE}:{line_of(guide, 'Families that are read')}: {name!r}; list every family that is read, no other"
    if str(len(FAMILIES)) not in guide:
        yield f"{GUIDE}:{line_of(guide, 'Families that are read')}: no number of families; {len(FAMILIES)} are read"
