"""Progress is a line that is written anew: of a terminal, or of a cell's output."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import progress
from workbench.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_it_is_one_line() -> None:
    out = Terminal()
    with Progress(total=4, desc="steps", file=out, mininterval=0) as bar:
        for _ in range(4):
            bar.update()
    assert "steps: 100%" in out.getvalue() and out.getvalue().endswith("\n") and out.getvalue().count("\n") == 1


@pytest.mark.parametrize("seconds", [0.0, 29.0, 31.0, 95.0, 600.0])
def test_elsewhere_it_is_a_whole_line_each_half_minute(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), 100.0
    # The module's own name, not the clock of the process: an event loop of another test would sleep for hours.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with Progress(total=1000, desc="steps", file=out, mininterval=0) as bar:
        for _ in range(1000):
            now += seconds / 1000
            bar.update()
    lines = out.getvalue().splitlines()
    assert seconds // 31 <= len(lines) <= seconds // 30 and "\r" not in out.getvalue()
    assert all(line.startswith("steps: ") and "/1000" in line for line in lines)


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


def test_no_progress_is_printed_where_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total=4, disable=True) as bar:
        bar.update(4)
    assert capsys.readouterr() == ("", "")
