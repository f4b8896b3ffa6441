"""Find the notebooks."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import WorkbenchError


def notebooks_folder(given: Path | None = None) -> Path:
    """Return `given`, or the nearest folder `notebooks` from the current folder upwards."""
    if given is not None:
        if not given.is_dir():
            raise WorkbenchError(f"--folder {given}: no such folder; name one that holds notebooks")
        return given.resolve()
    here = Path.cwd()
    for place in (here, *here.parents):
        if place.name == "notebooks" or (place / "notebooks").is_dir():
            return place if place.name == "notebooks" else place / "notebooks"
    raise WorkbenchError(f"no folder notebooks/ in {here} or above; name one with --folder")


def notebooks_in(folder: Path) -> list[Path]:
    """List the percent files, and the .ipynb files without one beside them, by name."""
    percent = [path for path in folder.glob("*.py") if is_percent(path)]
    paired = {path.stem for path in percent}
    alone = [path for path in folder.glob("*.ipynb") if path.stem not in paired]
    return sorted((*percent, *alone))


def is_percent(path: Path) -> bool:
    return any(line.startswith("# %%") for line in path.read_text(encoding="utf-8").splitlines())
