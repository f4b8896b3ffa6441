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
    cli("claims run --from-records", *place)
    return place


def test_the_ledger_as_table_page_and_json(judged: tuple[str, Path]) -> None:
    out = cli("claims", *judged).out
    assert "It is small" in out and "4 claims: 1 holds-with-limits, 1 not-testable-here, 2 not run yet" in out
    lines = cli("claims --format md --verdict 'not run yet'", *judged).out.splitlines()
    assert lines[0].startswith("| claim |") and [line.split(" | ")[0] for line in lines[2:4]] == ["| look", "| speed"]
    (row,) = cli("claims --format json --verdict holds-with-limits", *judged).json
    assert (row["claim"], row["reason"], row["limits"]) == ("size", "n is 4", "up to 5")


def test_one_claim_with_its_rule_figures_and_where(judged: tuple[str, Path]) -> None:
    out = cli("claims show size", *judged).out
    for words in ("It is small", "source A", "n: 4", "At most 3: holds", "def small(found):", "where"):
        assert words in out
    assert f"workbench claims run size --folder {judged[1]}" in out
    (trial,) = answer("claims show speed", *judged)["trials"]
    assert trial["command"] == f"workbench claims run speed --folder {judged[1]}" and trial["verdict"] == "not run yet"
    assert "did you mean 'size'" in refused("claims show sise", *judged)


def test_running_one_measures_it(place: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    ran = cli("claims run look", *place)
    assert "n is 2" in ran.out and "1 of 1: claims_looking" in ran.err
    (tmp_path / "speedy.yaml").unlink()
    assert "there is no such experiment" in cli("claims run speed", *place, code=1).err


def test_the_picture_is_drawn_from_the_record(place: tuple[str, Path], tmp_path: Path) -> None:
    show, file = "claims show speed --picture", tmp_path / "speed.svg"
    assert "has no record of a run, so no picture" in refused(show, file, *place)
    made.record(tmp_path, 0.5)
    cli(show, file, *place)
    assert file.read_text().startswith("<svg")
    assert ".svg or .png" in refused(show, tmp_path / "speed.gif", *place)
