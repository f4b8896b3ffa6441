"""The pages of docs/reference are what the code says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT
from tools.reference import pages


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield the first line of each page that is not as the code has it."""
    for name, text in pages().items():
        file = root / "docs" / "reference" / name
        written = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        made = text.splitlines()
        if written != made:
            same = next((n for n, pair in enumerate(zip(written, made, strict=False)) if pair[0] != pair[1]), len(made))
            yield f"docs/reference/{name}:{same + 1}: not as the code has it; run `python -m tools.reference`"
