"""The course as its notebooks describe it: one source for the start page, docs/course.md and README.md."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser import ROOT
from tools import course as pages
from workbench.errors import WorkbenchError
from workbench.lab.course import (
    FIRST_PICTURE,
    START_PAGE,
    describe,
    first_cell,
    neighbours,
    read_course,
)
from workbench.lab.start import command, is_percent, start_page
from workbench.own_folder import OWN_NOTEBOOKS

CELL = """# %% [markdown]
# # Steps: one after another
#
# Prose? Yes.
#
# - **Questions**: What is a step? Which of them
#   is slow?
# - **Afterwards you can**: count steps; read
#   a plan.
# - **Minutes**: 15

# %%
x = 1
"""


def test_every_notebook_but_the_start_page_describes_itself() -> None:
    percent = {path.name for path in (ROOT / "notebooks").glob("*.py") if is_percent(path)}
    course = read_course(ROOT / "notebooks")
    assert {each.file for each in course} == percent - {START_PAGE} and START_PAGE in percent
    assert OWN_NOTEBOOKS == ROOT / "notebooks" and read_course() == course
    for each in course:
        assert 5 <= each.minutes <= 60 and len(each.aims) >= 3 and each.questions and each.subtitle or each.title
    assert all("Exercise(" in (ROOT / "notebooks" / name).read_text() for name in percent)


def test_the_pages_are_as_the_notebooks_have_them() -> None:
    for page, text in pages.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run `python -m tools.course`"
    linked = {page.name for page, text in pages.pages().items() if "01_one_request.py)" in text}
    assert linked == {"README.md", "course.md", START_PAGE, "02_prefill_and_decode.py"}


def test_the_start_page_is_alive_before_anything_is_run() -> None:
    """The first cell has every title as a link, and its picture; nothing of it is an output."""
    first = first_cell((ROOT / "notebooks" / START_PAGE).read_text())
    course = read_course(ROOT / "notebooks")
    assert all(f"| [{each.title}]({each.file}) | {each.minutes} |" in first for each in course)
    assert f"]({FIRST_PICTURE})" in first and (ROOT / "notebooks" / FIRST_PICTURE).is_file()


def test_a_notebook_ends_with_its_neighbours() -> None:
    one = describe("1.py", CELL)
    assert one is not None
    course = [replace(one, file=f"{n}.py", title=f"T{n}") for n in (1, 2, 3)]
    assert neighbours(course, START_PAGE) == "---\nNext: [T1](1.py)\n"
    assert neighbours(course, "1.py") == "---\n[Start page](00_start.py) ·\nNext: [T2](2.py)\n"
    assert neighbours(course, "2.py") == "---\n[Start page](00_start.py) ·\nBefore: [T1](1.py) ·\nNext: [T3](3.py)\n"
    assert neighbours(course, "3.py") == "---\n[Start page](00_start.py) ·\nBefore: [T2](2.py)\n"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.name)
def test_the_code_of_an_exercise_is_folded_and_nothing_else(path: Path) -> None:
    """Its source says the answer; what a reader needs to see stands in a cell of its own, the question in the text
    above, where it is read before anything is run."""
    above = ""
    for cell in path.read_text(encoding="utf-8").split("\n# %%")[1:]:
        head, _, source = cell.partition("\n")
        is_exercise = "widgets.Exercise(" in source
        assert ('"source_hidden": true' in head) == is_exercise
        *before, call = ast.parse(source).body if is_exercise else [None]
        assert {type(line) for line in before} <= {ast.FunctionDef}, "imports and values stand in a cell that is seen"
        if isinstance(call, ast.Expr) and isinstance(call.value, ast.Call):
            assert re.match(r" \[markdown\]\n# \*\*(Question|Guess first)\*\*: [^?]+\?", above)
            assert not call.value.args, "the question stands in the text above"
        above = cell


def test_entries_are_read_over_several_lines() -> None:
    found = describe("a.py", CELL)
    assert found is not None and (found.title, found.subtitle, found.minutes) == ("Steps", "one after another", 15)
    assert found.questions == ("What is a step?", "Which of them is slow?")
    assert found.aims == ("count steps", "read a plan")
    assert first_cell("# %%\nx = 1\n") == "" and describe("b.py", "# %% [markdown]\n# # No entries\n") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# - **Minutes**: 15\n", "", "no entry '- **Minutes**: ...'"),
        (": 15", ": a few", "its minutes are a number, not 'a few'"),
        ("is slow?", "is slow", "each of its questions must end with '?'"),
    ],
)
def test_an_entry_that_is_wrong_is_named_with_its_notebook(old: str, new: str, message: str) -> None:
    with pytest.raises(WorkbenchError) as raised:
        describe("a.py", CELL.replace(old, new))
    assert str(raised.value).startswith("a.py: ") and message in str(raised.value)


def test_jupytext_keeps_the_entries(tmp_path: Path) -> None:
    import jupytext

    path = tmp_path / "a.py"
    path.write_text(CELL)
    jupytext.write(jupytext.read(path), tmp_path / "b.py", fmt="py:percent")
    assert [each.aims for each in read_course(tmp_path)][0] == ("count steps", "read a plan")


def test_jupyterlab_opens_with_the_start_page(tmp_path: Path) -> None:
    assert start_page(ROOT / "notebooks") == START_PAGE and start_page(tmp_path) is None
    words = command(ROOT / "notebooks", START_PAGE, None, True)
    assert f"--LabApp.default_url=/lab/tree/{START_PAGE}" in words


def test_make_lab_takes_a_port_and_no_browser() -> None:
    # As a person has it: the suite itself is run by make, whose variables would have it tell the folder it leaves.
    mine = ("MAKE", "MFLAGS", "PORT", "BROWSER")
    without = {name: value for name, value in os.environ.items() if not name.startswith(mine)}

    def said(*words: str) -> str:
        command = ["make", "-n", "-o", ".venv/lab", "lab", *words]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=without)
        return made.stdout.split("lab", 1)[1].strip()

    assert said() == "" and said("PORT=8899", "BROWSER=no") == "--port 8899 --no-browser"
