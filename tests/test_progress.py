"""Progress is a line that is written anew: of a terminal, or of a cell's output."""

from __future__ import annotations

import io
from typing import Any

import pytest

from workbench import progress
from workbench.progress import Progress


def test_in_a_terminal_it_is_a_line() -> None:
    out = io.StringIO()
    with Progress(total=4, desc="steps", file=out, mininterval=0) as bar:
        bar.update(4)
    assert "steps: 100%" in out.getvalue() and out.getvalue().endswith("\n")


def test_in_a_notebook_it_is_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython", reason="pip install 'inference-workbench[lab]'")
    shown: list[str] = []

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            shown.append(bundle["text/plain"])

    def display(bundle: dict[str, str], **_: Any) -> Handle:
        assert not shown
        shown.append(bundle["text/plain"])
        return Handle()

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    with Progress(total=4, desc="steps", mininterval=0) as bar:
        for _ in range(4):
            bar.update()
            bar.write("besides", file=io.StringIO())
    assert shown[0].startswith("steps:   0%") and shown[-1].startswith("steps: 100%") and "00:00" in shown[-1]
    assert all(line.strip() and "\n" not in line for line in shown)


def test_nobody_is_told_where_nobody_wants_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total=4, disable=True) as bar:
        bar.update(4)
    assert capsys.readouterr() == ("", "")
