"""The bugs of `python -m tools.planted_bugs` still apply to the tree. That each is caught is a command of its own."""

from __future__ import annotations

from tools.planted_bugs import PlantedBug, problems


def test_every_bug_applies() -> None:
    assert problems() == []


def test_a_bug_that_does_not_apply_is_named() -> None:
    bug = PlantedBug("none", "workbench/errors.py", "no such text", "", ("tests/no_such_folder",))
    occurs, missing = problems(bugs=[bug])
    assert "occurs 0 times" in occurs and missing.endswith("there is no tests/no_such_folder")
