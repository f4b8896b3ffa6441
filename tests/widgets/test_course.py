"""The start page: a row for each notebook with a link that opens it, and rules of projector mode that are scoped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser import ROOT
from workbench import widgets
from workbench.widgets.course.projector import HERE


def test_the_page_has_every_notebook_with_its_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT / "notebooks")
    course = widgets.Course()
    (shown,) = course.links.outputs
    assert shown["data"]["text/html"] == course.picture()
    links = re.findall(r"<a href='([^']+)'>", course.picture())
    assert links == [each.file for each in course.notebooks] and all(Path(link).is_file() for link in links)
    for each in course.notebooks:
        assert f">{each.minutes}</td>" in course.picture() and each.file in shown["data"]["text/plain"]
    monkeypatch.chdir(ROOT)
    assert "<a href='notebooks/01_one_request.py'>" in widgets.Course(ROOT / "notebooks").picture()
    course.close()


def test_projector_mode_touches_nothing_while_it_is_off() -> None:
    style = re.sub(r"/\*.*?\*/", "", (HERE / "projector.css").read_text(), flags=re.S)
    selectors = [each.strip() for rule in re.findall(r"([^{}]+)\{", style) for each in rule.split(",")]
    assert len(selectors) > 8 and all(each.startswith(".wb-projector") for each in selectors)


def test_a_course_has_a_switch_that_is_set() -> None:
    modes = (True, False, None)
    assert [widgets.Course(ROOT / "notebooks", projector=mode).projector.on for mode in modes] == [*modes]
