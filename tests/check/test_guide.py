"""The commands of the guide on loading a model, in order, as a reader would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh_environment import ROOT, make_unknown_family, steps
from tests.helpers.command_line import cli


def test_every_command_of_the_guide_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_unknown_family(tmp_path / "MY_FOLDER")
    commands = [step.command for step in steps((ROOT / "docs" / "guide" / "load_a_model.md").read_text())]
    assert len(commands) >= 9
    for command in commands:
        if command.startswith("workbench "):
            cli(command.removeprefix("workbench "))
