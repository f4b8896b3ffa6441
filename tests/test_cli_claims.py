"""`workbench claims`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.claims import made
from workbench.cli import main


def test_the_ledger_as_table_page_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = ["--folder", str(made.folder(tmp_path))]
    assert main(["claims", "run", "--from-records", *place]) == 0
    capsys.readouterr()
    assert main(["claims", *place]) == 0
    out = capsys.readouterr().out
    assert "It is small" in out and "4 claims: 1 holds-with-limits, 1 not-testable-here, 2 not run yet" in out
    assert main(["claims", "--format", "md", "--verdict", "not run yet", *place]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| claim |") and [line.split(" | ")[0] for line in lines[2:4]] == ["| look", "| speed"]
    assert main(["claims", "--format", "json", "--verdict", "holds-with-limits", *place]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["claim"], row["reason"], row["limits"]) == ("size", "n is 4", "up to 5")


def test_one_claim_with_its_rule_figures_and_where(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = ["--folder", str(made.folder(tmp_path))]
    main(["claims", "run", "--from-records", *place])
    capsys.readouterr()
    assert main(["claims", "show", "size", *place]) == 0
    out = capsys.readouterr().out
    for words in ("It is small", "source A", "n: 4", "At most 3: holds", "def small(found):", "where"):
        assert words in out
    assert main(["claims", "show", "speed", *place, "--json"]) == 0
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["command"] == "workbench run experiments/speedy.yaml" and trial["verdict"] == "not run yet"


def test_running_one_measures_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    place = ["--folder", str(made.folder(tmp_path))]
    assert main(["claims", "run", "look", *place]) == 0
    captured = capsys.readouterr()
    assert "n is 2" in captured.out and "1 of 1: claims_looking" in captured.err
    (tmp_path / "speedy.yaml").unlink()
    assert main(["claims", "run", "speed", *place]) == 1
    assert "there is no such experiment" in capsys.readouterr().err


def test_the_picture_is_drawn_from_the_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="pip install 'inference-workbench[plots]'")
    place = ["--folder", str(made.folder(tmp_path))]
    file = tmp_path / "speed.svg"
    assert main(["claims", "show", "speed", "--picture", str(file), *place]) == 2
    assert "has no record of a run, so no picture" in capsys.readouterr().err
    made.record(tmp_path, 0.5)
    assert main(["claims", "show", "speed", "--picture", str(file), *place]) == 0
    assert file.read_text().startswith("<svg")
    assert main(["claims", "show", "speed", "--picture", str(tmp_path / "speed.gif"), *place]) == 2
    assert ".svg or .png" in capsys.readouterr().err


def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = ["--folder", str(made.folder(tmp_path))]
    assert main(["claims", "show", "sise", *place]) == 2
    assert "did you mean 'size'" in capsys.readouterr().err
    assert main(["claims", "--verdict", "refused", *place]) == 2
    assert "did you mean 'refuted'" in capsys.readouterr().err
