"""The course as its notebooks describe it: one source for the start page, docs/course.md and README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import ROOT
from tools import course as pages
from workbench.errors import WorkbenchError
from workbench.lab.course import INSTALLED_COURSE, START_PAGE, describe, first_cell, read_course
from workbench.lab.start import command, is_percent, start_page

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
    assert INSTALLED_COURSE == ROOT / "notebooks" and read_course() == course
    for each in course:
        assert 5 <= each.minutes <= 60 and len(each.aims) >= 3 and each.questions and each.subtitle or each.title
    assert all("Exercise(" in (ROOT / "notebooks" / name).read_text() for name in percent)


def test_the_pages_are_as_the_notebooks_have_them() -> None:
    for page, text in pages.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run `python -m tools.course`"
    changed = [page for page, text in pages.pages().items() if "[One request]" in text or "[one request]" in text]
    assert len(changed) == 2


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
        ("is slow?", "is slow", "each of its questions ends with '?'"),
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
