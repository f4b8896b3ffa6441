"""Check that every figure in the prose of docs/scale.md stands in one of the page's commands or in its output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT, line_of, texts
from tools.scale_page import BLOCK, blocks

PAGE = "docs/scale.md"
ASSUMED = "## Assumptions"  # a section of figures that no command prints; they are options of the commands
FIGURE = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.,-])\d+\.\d+|(?<![\w.,-])\d{2,}")


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield figures that no command contains or prints, and commands that are not in a block of their own."""
    text = texts(root).get(PAGE, "")
    found = blocks(text)
    if len(found) != text.count("$ workbench"):
        yield f"{PAGE}:1: {len(found)} blocks for {text.count('$ workbench')} commands; begin each with `$ workbench`"
    shown = " ".join(f"{command}\n{printed}" for command, printed in found)
    head, _, rest = text.partition(ASSUMED)
    prose = head + "\n## ".join(rest.split("\n## ")[1:])
    for figure in FIGURE.findall(re.sub(r"`[^`]*`", "", BLOCK.sub("", prose))):
        if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", shown):
            yield f"{PAGE}:{line_of(text, figure)}: {figure} is printed by no command; write what is printed"
