"""Show the course: links that open its notebooks, and the switch for projector mode."""

from __future__ import annotations

import os
from pathlib import Path

import ipywidgets

from workbench.errors import WorkbenchError
from workbench.lab.course import START_PAGE, read_course
from workbench.own_folder import OWN_NOTEBOOKS
from workbench.widgets.course.picture import draw_course
from workbench.widgets.course.projector import ProjectorSwitch
from workbench.widgets.view import PictureWidget


class Course(PictureWidget):
    """A view of every notebook of the course with its minutes, questions and aims; a click on a title opens that
    notebook.

    A button switches projector mode in all open notebooks; `projector` switches it as soon as a cell shows the course.
    `folder` holds the notebooks; default: the current folder if it has the start page, else the installed course.
    Raises WorkbenchError if no notebook has the description that `workbench.lab.course` reads.
    """

    def __init__(self, folder: Path | str | None = None, projector: bool | None = None):
        super().__init__()
        here = [Path.cwd()] if (Path.cwd() / START_PAGE).exists() else []
        places = [*here, OWN_NOTEBOOKS] if folder is None else [Path(folder)]
        found = ((place, read_course(place)) for place in places)
        self.folder, self.notebooks = next(((place, course) for place, course in found if course), (places[0], []))
        if not self.notebooks:
            raise WorkbenchError(f"no notebook in {self.folder} describes itself; see workbench/lab/course.py")
        self.projector = ProjectorSwitch(projector)
        # JupyterLab opens links of an output as notebooks; links of other widgets are opened by the browser.
        self.links = ipywidgets.Output()
        self.children = (self.projector, self.links)
        self.redraw()

    def redraw(self) -> None:
        plain = "\n".join(f"{each.file}: {each.title}, {each.minutes} minutes" for each in self.notebooks)
        data = {"text/html": self.picture(), "text/plain": plain}
        self.links.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def picture(self) -> str:
        folder = os.path.relpath(self.folder.resolve()).replace(os.sep, "/")
        return draw_course(self.notebooks, "" if folder == "." else folder)
