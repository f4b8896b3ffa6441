"""Draw the course as a table: every notebook with its minutes, questions and learning aims."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from workbench import svg
from workbench.lab.course import CourseNotebook

# Long selectors override JupyterLab's own rules for tables in outputs. In a narrow container (a small window, a
# projector) a row becomes a paragraph.
STYLE = (
    "<style>.wb-pic .wb-course-table{container-type:inline-size;font-size:13px;line-height:1.45}"
    ".wb-pic .wb-course-table table{border-collapse:collapse;width:100%;table-layout:auto;margin:0;font-size:inherit}"
    ".wb-pic .wb-course-table :is(th,td){text-align:left;vertical-align:top;padding:7px 10px;line-height:inherit;"
    "white-space:normal;border-bottom:1px solid var(--jp-border-color2,#d0d0d0)}"
    ".wb-pic .wb-course-table :is(td:first-child,td.questions){width:27%}"
    ".wb-pic .wb-course-table .minutes{text-align:right}"
    ".wb-pic .wb-course-table a{font-weight:600}.wb-pic .wb-course-table p{margin:0 0 4px}"
    ".wb-pic .wb-course-table ul{margin:0;padding-left:1.2em}"
    "@container (max-width:540px){.wb-pic .wb-course-table tr:first-child{display:none}"
    ".wb-pic .wb-course-table tr{display:block;padding:6px 0;border-bottom:1px solid var(--jp-border-color2,#d0d0d0)}"
    ".wb-pic .wb-course-table td:is(td,.minutes,.questions){display:block;width:auto;text-align:left;"
    "border:0;padding:1px 10px}.wb-pic .wb-course-table td.minutes::after{content:' minutes'}}</style>"
)


def draw_course(course: Sequence[CourseNotebook], folder: str = "") -> str:
    """Return the table as HTML; `folder` is the notebooks' folder, relative to the page."""
    heads = (
        "<tr><th scope='col'>notebook</th><th scope='col' class='minutes'>minutes</th>"
        "<th scope='col'>it answers</th><th scope='col'>afterwards you can</th></tr>"
    )
    rows = "".join(_row(notebook, folder) for notebook in course)
    return svg.html(STYLE, f'<div class="wb-course-table"><table>{heads}{rows}</table><p>{total(course)}</p></div>')


def total(course: Sequence[CourseNotebook]) -> str:
    """Return a text with the number of notebooks and the sum of their minutes."""
    hours, minutes = divmod(sum(notebook.minutes for notebook in course), 60)
    time = f"{hours} hours and {minutes} minutes" if minutes else f"{hours} hours"
    return f"{len(course)} notebooks, {time} in all."


def _row(notebook: CourseNotebook, folder: str) -> str:
    link = escape(quote(f"{folder}/{notebook.file}" if folder else notebook.file))
    questions = "".join(f"<p>{escape(question)}</p>" for question in notebook.questions)
    aims = "".join(f"<li>{escape(aim)}</li>" for aim in notebook.aims)
    return (
        f"<tr><td><a href='{link}'>{escape(notebook.title)}</a><br>{escape(notebook.subtitle)}</td>"
        f"<td class='minutes'>{notebook.minutes}</td><td class='questions'>{questions}</td>"
        f"<td><ul>{aims}</ul></td></tr>"
    )
