"""Runs that README names are those that were made; that no command is forgotten is tools/lint/blocks.py."""

from __future__ import annotations

from pathlib import Path

from tests.fresh_environment import put_in_place


def test_runs_that_readme_names_are_those_that_were_made(tmp_path: Path) -> None:
    for name in ("first_light-20260101-000000-aaaa", "first_light-20260101-000001-bbbb"):
        (tmp_path / name).mkdir()
    first, last = "runs/first_light-20260101-000000-aaaa", "runs/first_light-20260101-000001-bbbb"
    assert put_in_place("workbench inspect runs/first_light-...", tmp_path) == f"workbench inspect {first}"
    command = put_in_place("workbench compare runs/a runs/b --baseline runs/a:dense", tmp_path)
    assert command == f"workbench compare {first} {last} --baseline {first}"
