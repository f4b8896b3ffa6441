"""Every notebook runs from its first cell to its last, in JupyterLab where there is a browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser import ROOT
from tools.notebooks.check import visit_notebook
from tools.notebooks.page import LabSession
from workbench.lab.execute import execute
from workbench.lab.start import missing_browser, missing_lab, notebooks_in
from workbench.models.store import is_at_hand

NOTEBOOKS = notebooks_in(ROOT / "notebooks")
SPOKEN = [path for path in NOTEBOOKS if "workbench.default_model()" in path.read_text(encoding="utf-8")]
ANSWERED = "\n# %%\nfrom workbench.widgets.exercise.view import unanswerable\n\nassert not unanswerable()\n"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking := missing_lab():
        pytest.skip(lacking)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.browser
@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_without_input_and_exports_with_pictures(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Run it once: in JupyterLab, or without a page where there is no browser."""
    if missing_browser():
        assert execute(path) == []
    else:
        lab: LabSession = request.getfixturevalue("lab")
        assert visit_notebook(lab, f"notebooks/{path.name}", tmp_path).faults == []


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.skipif(not is_at_hand("smollm2"), reason="smollm2 is not at hand: `workbench model get smollm2`")
@pytest.mark.parametrize("path", SPOKEN, ids=lambda path: path.name)
def test_a_notebook_that_the_default_model_speaks_in_runs_with_the_real_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite's default is the tiny one, whether or not the real one is at hand; exercises have answers with both."""
    monkeypatch.setenv("WORKBENCH_DEFAULT_MODEL", "smollm2")
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8") + ANSWERED, encoding="utf-8")
    assert execute(copy) == []


def test_five_notebooks_ask_who_speaks() -> None:
    assert [path.name[:2] for path in SPOKEN] == ["01", "02", "05", "10", "11"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_saving_in_jupyterlab_leaves_the_percent_file_as_it_is(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jupytext.cli import jupytext

    jupytext([str(path), "--to", "py:percent", "--output", "-"])
    assert capsys.readouterr().out == path.read_text()


@pytest.mark.processes
def test_a_failing_cell_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("# %% [markdown]\n# Prose.\n\n# %%\nx = 1\n\n# %%\n# a comment\nx / 0\n\n# %%\nx = 2\n")
    assert [str(error) for error in execute(path)] == ["cell 2 (# a comment): ZeroDivisionError: division by zero"]
