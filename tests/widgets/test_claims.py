"""The claims as a widget: its list and texts are those of the command, and its button measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.claims import made
from tests.helpers.widgets import CommandInProcess
from workbench.errors import WorkbenchError
from workbench.widgets import Claims
from workbench.widgets.command_process import CommandProcess


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("workbench.widgets.claims.view.CommandProcess", CommandInProcess)
    found = made.folder(tmp_path)
    assert CommandInProcess(["claims", "run", "size", "--folder", str(found)], lambda: None).wait() == 0
    return found


def test_verdicts_words_and_details(folder: Path) -> None:
    view = Claims(folder)
    assert "4 claims: 1 holds-with-limits, 1 not-testable-here, 2 not run yet" in view.shown.content
    view.verdict = "holds-with-limits"
    assert [row["claim"] for row in view.rows] == ["size"]
    view.verdict, view.words = "every verdict", "IT small"
    assert {row["claim"] for row in view.rows} == {"look", "size"}
    view.shown.picked = "size"  # as a click does
    view.throttle.flush()
    for words in ("n 4, not", "up to 4", "A: 3", "n &lt;= 3 else", 'aria-selected="true"'):
        assert words in view.shown.content
    with pytest.raises(WorkbenchError, match="did you mean 'size'"):
        view.claim = "sise"


def test_every_suggested_word_finds_a_claim() -> None:
    from workbench.widgets.claims.view import suggested_words

    view = Claims()
    (field,) = (each for row in view.children for each in getattr(row, "children", ()) if each.description == "words")
    offered = suggested_words(view.rows)
    assert len(offered) == 8 and set(field.options) == set(offered) and field.placeholder.split()[-1] in offered
    for typed in (*offered, f"{offered[0]},"):
        view.words = typed
        assert view.rows, typed
    view.close()


def test_every_verdict_has_a_sign_of_its_own() -> None:
    from workbench.claims.tables import ORDER
    from workbench.widgets.claims.picture import VERDICT_SIGNS

    assert set(VERDICT_SIGNS) == set(ORDER) and len({sign for sign, _ in VERDICT_SIGNS.values()}) == len(ORDER)


def test_the_button_measures_and_a_quick_look_writes_nothing(folder: Path) -> None:
    view = Claims(folder)
    (folder.parent / "speedy.yaml").unlink()
    view.claim = "speed"
    assert view.measure().wait() == 1
    assert "speedy.yaml: there is no such experiment" in view.shown.content
    assert [file.name for file in (folder / "records").iterdir()] == ["size.json"]


def test_a_whole_measurement_is_stored(folder: Path) -> None:
    view = Claims(folder, claim="look")
    view.whole = True
    assert view.measure().wait() == 0
    assert "holds: n 2, &lt;= 3" in view.shown.content
    assert [row["verdict"] for row in view.rows if row["claim"] == "look"] == ["holds"]


@pytest.mark.processes
def test_a_command_can_be_stopped(tmp_path: Path) -> None:
    news: list[int | None] = []
    job = CommandProcess(["claims", "run"], lambda: news.append(job.returncode))  # the one process behind a button
    job.stop()
    assert job.wait() != 0 and news[-1] == job.returncode
    job.stop()  # nothing any more
