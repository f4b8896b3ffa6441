"""Check that the experiment of every committed record can be read, so that `workbench reproduce` can run it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield records whose experiment has settings that do not exist today."""
    for file in sorted((root / "experiments" / "records").glob("*.json")):
        asked = json.loads(file.read_text(encoding="utf-8")).get("experiment")
        try:
            if isinstance(asked, str) and "\n" in asked:
                Experiment.from_yaml(asked)
            elif isinstance(asked, dict):
                Experiment.from_values(asked)
        except WorkbenchError as error:
            yield f"experiments/records/{file.name}:1: {' '.join(str(error).split())}; rename its settings"
