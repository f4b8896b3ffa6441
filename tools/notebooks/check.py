"""Check every notebook in a real JupyterLab by a real browser: run it, export it, view the export offline, and save
screenshots of its widgets for a README.

    python -m tools.notebooks.check                                # all of them
    python -m tools.notebooks.check --pictures notebooks/pictures  # with a picture of each widget
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.lab.course import FIRST_PICTURE, START_PAGE
from workbench.lab.execute import widget_outputs
from workbench.lab.start import missing_browser, missing_lab, notebooks_folder, notebooks_in, require
from workbench.models.store import is_at_hand

if TYPE_CHECKING:
    from tools.notebooks.page import LabSession, NotebookPage

# Of the notebook's exercises, where it has some: those whose answer cannot be computed after all cells have run.
UNANSWERABLE = "getattr(__import__('sys').modules.get('workbench.widgets.exercise.view'), 'unanswerable', list)()"
START_PICTURE = """# %%
import workbench
from workbench import widgets

runner = workbench.load("smollm2", backend="eager")
widgets.TokenPath(runner, "The cat sat on the mat because", section="lens")
"""


class WidgetScreenshots:
    """Screenshots of widgets in a folder.

    `pagemap.png` is the first `wb-pagemap`; later ones have their notebook's name as well. `start.png` is the start
    page's, which is there before anything is run: a logit lens of the real model, made where that is at hand.
    """

    def __init__(self, folder: Path, dark: bool = False) -> None:
        self.folder, self.dark = folder, dark
        self.taken: list[Path] = []

    def take(self, page: NotebookPage) -> None:
        names = [self._name(widget.name, Path(page.path).stem) for widget in page.widgets()]
        self._shoot(page, names, "")
        if self.dark:
            page.lab.theme("dark")
            page.settle()
            self._shoot(page, names, "-dark")
            page.lab.theme("light")

    def take_start(self, lab: LabSession) -> None:
        """Save the picture of the start page."""
        page = lab.open(lab.write("start_picture.py", START_PICTURE))
        page.run_all()
        page.screenshot(self.folder / Path(FIRST_PICTURE).name, page.widget("wb-tokenpath").locator(".wb-picture"))
        page.close()

    def _name(self, widget: str, notebook: str) -> str:
        plain = widget.removeprefix("wb-")
        wanted = [plain, f"{plain}-{notebook}", *(f"{plain}-{notebook}-{n}" for n in range(2, 1000))]
        if widget == "widget":
            wanted = wanted[1:]
        name = next(name for name in wanted if self.folder / f"{name}.png" not in self.taken)
        self.taken.append(self.folder / f"{name}.png")
        return name

    def _shoot(self, page: NotebookPage, names: list[str], suffix: str) -> None:
        for place, name in enumerate(names):
            output = page.views().nth(place)
            ours = output.locator('[class*="wb-"]')
            page.screenshot(self.folder / f"{name}{suffix}.png", ours.first if ours.count() else output)


@dataclass(frozen=True)
class NotebookVisit:
    """The findings of one notebook's check."""

    notebook: str
    seconds: float
    num_run: int
    num_cells: int
    widgets: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    console_errors: tuple[str, ...] = ()
    outside_requests: tuple[str, ...] = ()
    without_picture: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        """Return one line for each fault; empty if the notebook is as it should be."""
        return [
            *self.errors,
            *(f"console: {text}" for text in self.console_errors),
            *(f"asked another machine: {url}" for url in self.outside_requests),
            *(f"no picture in the exported page: {name}" for name in self.without_picture),
            *([f"{self.num_run} of {self.num_cells} cells ran"] if self.num_run < self.num_cells else []),
        ]

    def __str__(self) -> str:
        widgets = ", ".join(dict.fromkeys(self.widgets))
        ran = f"{self.notebook}: {self.num_run} of {self.num_cells} cells in {self.seconds:.1f} s  {widgets}"
        return "\n".join([ran, *(f"    {fault}" for fault in self.faults)])


def visit_notebook(lab: Any, path: str, out: Path, pictures: WidgetScreenshots | None = None) -> NotebookVisit:
    """Open a notebook of a `LabSession`, run it and collect its findings.

    The executed notebook and its export are written to `out`; screenshots of its widgets where `pictures` are wanted.
    """
    from playwright.sync_api import Error as PlaywrightError

    from workbench.lab.export import write_html

    name, start = Path(path).name, time.perf_counter()
    try:
        page = lab.open(path)
    except PlaywrightError as error:
        return NotebookVisit(name, time.perf_counter() - start, 0, 0, errors=(error.message.splitlines()[0],))
    late: tuple[str, ...] = ()
    try:
        page.run_all()
    except WorkbenchError as error:
        late = (str(error),)
    unanswerable = () if late else tuple(ast.literal_eval(page.evaluate(UNANSWERABLE)))
    (ran, cells), document, widgets = page.executed(), page.document(), page.widgets()
    if pictures is not None:
        pictures.take(page)
    errors = (*late, *map(str, page.errors()), *unanswerable)
    console, outside = tuple(page.console_errors), tuple(page.outside_requests)
    page.close()
    (out / f"{Path(path).stem}.ipynb").write_text(json.dumps(document, indent=1), encoding="utf-8")
    shown, asked = lab.shown_offline(write_html(document, out / f"{Path(path).stem}.html"), widget_outputs(document))
    without = tuple(str(widget) for widget, seen in zip(widgets, shown, strict=True) if not seen)
    outside += tuple(f"the exported page: {url}" for url in asked)
    names = tuple(widget.name for widget in widgets)
    return NotebookVisit(name, time.perf_counter() - start, ran, cells, names, errors, console, outside, without)


def check_notebooks(
    folder: Path,
    only: Sequence[str] = (),
    pictures: WidgetScreenshots | None = None,
    out: Path | None = None,
    on_visit: Callable[[NotebookVisit], None] = lambda visit: None,
) -> list[NotebookVisit]:
    """Check the notebooks of `folder`, or those named in `only`, in a private server and browser."""
    require(missing_lab(), missing_browser())
    from tools.notebooks.browser import Browser
    from tools.notebooks.page import LabSession
    from workbench.lab.server import LabServer

    names = [path.name for path in notebooks_in(folder)]
    chosen = list(only) or names
    for name in chosen:
        if name not in names:
            raise WorkbenchError(f"lab: no notebook {name} in {folder}; there are {', '.join(names) or 'none'}")
    if not chosen:
        raise WorkbenchError(f"lab: {folder} holds no notebook; a percent file has lines that begin with '# %%'")
    visits = []
    with tempfile.TemporaryDirectory(prefix="workbench-lab-kept-") as bin_, LabServer({"notebooks": folder}) as server:
        kept = Path(bin_) if out is None else out
        kept.mkdir(parents=True, exist_ok=True)
        with Browser() as browser:
            lab = LabSession(server, browser)
            for name in chosen:
                visits.append(visit_notebook(lab, f"notebooks/{name}", kept, pictures))
                on_visit(visits[-1])
            if pictures is not None and START_PAGE in chosen and is_at_hand("smollm2"):
                pictures.take_start(lab)
    return visits


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("notebook", nargs="*", help="names of notebooks; all unless given")
    parser.add_argument("--folder", type=Path, help="folder of notebooks; the nearest notebooks/ upwards unless given")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each widget")
    parser.add_argument("--dark", action="store_true", help="with --pictures: draw the dark theme too")
    parser.add_argument("--keep", type=Path, help="folder for executed notebooks and exports")
    given = parser.parse_args()
    album = WidgetScreenshots(given.pictures, given.dark) if given.pictures else None
    visits = check_notebooks(notebooks_folder(given.folder), given.notebook, album, given.keep, print)
    return 1 if any(visit.faults for visit in visits) else 0


if __name__ == "__main__":
    sys.exit(main())
