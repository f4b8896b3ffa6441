"""`workbench claims`: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.claims import made
from tests.helpers.command_line import answer, cli, refused


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, Path]:
    return "--folder", made.folder(tmp_path)


@pytest.fixture
def judged(place: tuple[str, Path]) -> tuple[str, Path]:
    cli("claims run size", *place)
    return place


def test_the_claims_as_table_page_and_json(judged: tuple[str, Path]) -> None:
    out = cli("claims", *judged).out
    assert "It is small" in out and "4 claims: 1 holds-with-limits, 1 not-testable-here, 2 not run yet" in out
    lines = cli("claims --format md --verdict 'not run yet'", *judged).out.splitlines()
    assert lines[0].startswith("| claim |") and [line.split(" | ")[0] for line in lines[2:4]] == ["| look", "| speed"]
    (row,) = cli("claims --format json --verdict holds-with-limits", *judged).json
    assert (row["claim"], row["reason"], row["limits"]) == ("size", "n 4, not <= 3; n 4, <= 5", "up to 4")


def test_one_claim_with_its_rule_figures_and_where(judged: tuple[str, Path]) -> None:
    out = cli("claims show size", *judged).out
    for words in ("It is small", "source A", "n: 4", "words: a few", "n <= 3 else n <= 5", "def small(n):", "where"):
        assert words in out
    assert f"workbench claims run size --folder {judged[1]}" in out
    (trial,) = answer("claims show speed", *judged)["trials"]
    assert trial["command"] == f"workbench claims run speed --folder {judged[1]}" and trial["verdict"] == "not run yet"
    assert "did you mean 'size'" in refused("claims show sise", *judged)


def test_running_one_measures_it(place: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    ran = cli("claims run look --quick", *place)
    assert "n 1, <= 3" in ran.out and "1 of 1: look: measurement look" in ran.err and "nothing is stored" in ran.err
    (row,) = answer("claims run look --model another", *place)["claims"]
    assert (row["claim"], row["model"], row["figures"]["letters"]) == ("look", "another", 7)
    (tmp_path / "speedy.yaml").unlink()
    assert "there is no such experiment" in cli("claims run speed", *place, code=1).err
