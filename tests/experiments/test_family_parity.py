"""The command that holds families to transformers: its table, and that it names what differs."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from experiments import family_parity
from workbench.model.linear import RMSNorm

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'transformers>=5'")
APP = typer.Typer()
APP.command()(family_parity.main)


def test_a_family_holds_in_every_way() -> None:
    done = CliRunner().invoke(APP, ["--families", "qwen2,gpt2", "--json"])
    record = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.exit_code == 0 and record["verdict"]["holds"]
    ways = {way for row in record["rows"] for way in row["errors"]}
    assert ways == {"oracle", "whole", "in chunks", "token by token", "beside another", "after a prefix hit"}
    assert {row["family"] for row in record["rows"]} == {"qwen2", "gpt2"}


def test_a_wrong_norm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: 1.001 * right(self, x))
    done = CliRunner().invoke(APP, ["--families", "qwen3"])
    assert done.exit_code == 1 and "0 greedy tokens differ" in done.stdout


def test_a_family_that_is_not_there_is_refused() -> None:
    done = CliRunner().invoke(APP, ["--families", "qwen17"])
    assert "no family of 'qwen17'" in str(done.exception)
