"""Read the course's description from the first cell of each notebook: questions, aims and minutes.

    # %% [markdown]
    # # One request: text to tokens to text
    #
    # What the notebook is about, in prose.
    #
    # - **Questions**: What happens to my text?
    # - **Afterwards you can**: name the steps; say which of them is slow.
    # - **Minutes**: 20

An entry may continue on the next lines. Questions end with a question mark, aims are separated by semicolons.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.own_folder import OWN_NOTEBOOKS

START_PAGE = "00_start.py"
REAL_MODEL = "14_real_model.py"
FIRST_PICTURE = "pictures/start.png"  # the only picture that a wheel includes
FIRST_PICTURE_SHOWS = "What a model would say next, after each of its layers"
ENTRIES = ("Questions", "Afterwards you can", "Minutes")
ENTRY = re.compile(rf"^- \*\*({'|'.join(ENTRIES)})\*\*: (.*(?:\n(?!- |\n).+)*)", re.M)


@dataclass(frozen=True)
class CourseNotebook:
    """A notebook of the course: its questions, its aims and its duration in minutes."""

    file: str
    title: str
    subtitle: str
    questions: tuple[str, ...]
    aims: tuple[str, ...]
    minutes: int


def read_course(folder: Path | None = None) -> list[CourseNotebook]:
    """Return the notebooks of `folder` (default: the installed course) that have a description, in order."""
    found = (_read(path) for path in sorted((folder or OWN_NOTEBOOKS).glob("*.py")))
    return [notebook for notebook in found if notebook is not None]


def describe(file: str, source: str) -> CourseNotebook | None:
    """Parse the description in the first cell of a percent file; None if it has no such entries.

    Raises:
        WorkbenchError: if an entry is missing, a question has no question mark, or the minutes are not a number.
    """
    text = first_cell(source)
    entries = {match[1]: " ".join(match[2].split()) for match in ENTRY.finditer(text)}
    heading = re.search(r"^# (.*)$", text, re.M)
    if not entries or heading is None:
        return None
    for name in ENTRIES:
        if not entries.get(name):
            raise WorkbenchError(f"{file}: the first cell has no entry '- **{name}**: ...'")
    questions = tuple(each.strip() for each in re.findall(r"[^?]+\?", entries["Questions"]))
    if "".join(questions).replace(" ", "") != entries["Questions"].replace(" ", ""):
        raise WorkbenchError(f"{file}: each of its questions must end with '?', not {entries['Questions']!r}")
    if not entries["Minutes"].isdecimal():
        raise WorkbenchError(f"{file}: its minutes are a number, not {entries['Minutes']!r}")
    title, _, subtitle = heading[1].partition(": ")
    aims = tuple(each.strip() for each in entries["Afterwards you can"].rstrip(".").split(";"))
    return CourseNotebook(file, title, subtitle, questions, aims, int(entries["Minutes"]))


def first_cell(source: str) -> str:
    """Return the Markdown of a percent file's first cell; empty if it is a code cell."""
    lines = source.splitlines()
    if not lines or lines[0] != "# %% [markdown]":
        return ""
    return "\n".join(_markdown(lines[1:]))


def questions_table(course: Sequence[CourseNotebook], folder: str = "../notebooks") -> str:
    """Return the Markdown table of docs/course.md: a row for each notebook, with links into `folder`."""
    rows = [
        f"| {' '.join(each.questions)} | [{each.title}]({folder}/{each.file}) | {each.minutes} |" for each in course
    ]
    return "\n".join(["| the question | the notebook | minutes |", "|---|---|---|", *rows, ""])


def titles_list(course: Sequence[CourseNotebook], folder: str = "notebooks") -> str:
    """Return the list in README.md: every notebook's title as a link into `folder`."""
    links = [f"[{each.title.lower()}]({folder}/{each.file})" for each in course]
    return f"{', '.join(links[:-1])} and {links[-1]}"


def start_list(course: Sequence[CourseNotebook]) -> str:
    """Return the start page's content before any cell runs: a first step, and links to all notebooks."""
    first = next((each for each in course if each.file == REAL_MODEL), course[0])
    rows = [f"| [{each.title}]({each.file}) | {each.minutes} | {each.questions[0]} |" for each in course]
    return "\n".join([
        "| notebook | minutes | it answers |", "|:---|---:|:---|", *rows, "",
        f"**For a first look**: [{first.title}]({first.file}), {first.minutes} minutes; then the notebooks in order.",
        f"{FIRST_PICTURE_SHOWS}:", "",
        f"[![{FIRST_PICTURE_SHOWS}]({FIRST_PICTURE})]({first.file})", "",
    ])  # fmt: skip


def neighbours(course: Sequence[CourseNotebook], file: str) -> str:
    """Return the footer of the notebook `file`: links to the start page, and to the previous and the next notebook."""
    files = [each.file for each in course]
    at = files.index(file) if file in files else -1
    links = [f"[Start page]({START_PAGE})"] if file != START_PAGE else []
    links += [f"Before: [{each.title}]({each.file})" for each in course[max(0, at - 1) : max(0, at)]]
    links += [f"Next: [{each.title}]({each.file})" for each in course[at + 1 : at + 2]]
    return "---\n" + " ·\n".join(links) + "\n"


def _read(path: Path) -> CourseNotebook | None:
    return describe(path.name, path.read_text(encoding="utf-8"))


def _markdown(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#") or line.startswith("# %%"):
            return
        yield line.removeprefix("#").removeprefix(" ")
