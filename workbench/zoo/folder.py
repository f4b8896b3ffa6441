"""Load the entries of a folder: each `*.yaml` file, with the part in the `*.py` file of the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.errors import WorkbenchError, nearest
from workbench.own_folder import OWN_EXPERIMENTS
from workbench.zoo.entry import LoadedEntry
from workbench.zoo.question import experiment_of

ZOO_FOLDER = OWN_EXPERIMENTS / "zoo"


def load_zoo(folder: Path = ZOO_FOLDER) -> dict[str, LoadedEntry]:
    """Return all entries by name, in alphabetical order. Settings are checked; parts are not loaded.

    Raises:
        WorkbenchError: the first mistake of an entry, or a folder without entries.
    """
    found: dict[str, LoadedEntry] = {}
    for file in sorted(folder.glob("*.yaml")):
        entry = found[file.stem] = LoadedEntry.load(file)
        experiment_of(entry)
    if not found:
        raise WorkbenchError(f"{folder}: no entries there; give a folder with NAME.yaml and NAME.py")
    return found


def select_entries(entries: Mapping[str, LoadedEntry], names: Sequence[str]) -> dict[str, LoadedEntry]:
    """Select entries by name. Raises WorkbenchError for an unknown name."""
    for wrong in (name for name in names if name not in entries):
        raise WorkbenchError(f"no entry {wrong!r}{nearest(wrong, entries)}; `workbench zoo` lists them")
    return {name: entries[name] for name in names}
