"""The bugs of `python -m tools.planted_bugs` still apply to the tree. That each is caught is a command of minutes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.lint.tree import ROOT
from tools.planted_bugs import BUGS, PlantedBug

WHERE = "tools/planted_bugs"


def faults(root: Path = ROOT, bugs: Sequence[PlantedBug] = BUGS) -> Iterator[str]:
    """Yield bugs whose text is not there once, that are no Python, or whose tests are gone."""
    with tempfile.TemporaryDirectory() as folder:
        for bug in bugs:
            copy = Path(folder) / bug.file
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy(root / bug.file, copy)
                bug.apply(Path(folder))
                if copy.suffix == ".py":
                    compile(copy.read_text(encoding="utf-8"), bug.file, "exec")
            except (OSError, ValueError, SyntaxError) as error:
                yield f"{WHERE}:1: {bug.breaks}: {error}; plant it anew"
            for test in bug.tests:
                if not (root / test).exists():
                    yield f"{WHERE}:1: {bug.breaks}: no file {test}; name the tests that cover it"
