"""The table of formats: its figures, and that a wrong format is seen."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from experiments import formats_table
from workbench.model.hf.kept import KeptRun

APP = typer.Typer()
APP.command()(formats_table.main)
WORDS = ["--formats", "compressed-tensors INT8", "--backend", "eager", "--rounds", "1", "--json"]


def test_a_format_is_measured() -> None:
    done = CliRunner().invoke(APP, WORDS)
    record = json.loads(done.stdout)
    dense, packed = record["rows"]
    assert done.exit_code == 0 and record["verdict"]["holds"]
    assert packed["in_memory"] == "int8" and packed["memory_bytes"] < 0.7 * dense["memory_bytes"]
    assert dense["kl"] == 0 < packed["kl"] < 0.05 and packed["same_top"] > 0.9


def test_a_wrong_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KeptRun.tensors
    monkeypatch.setattr(KeptRun, "tensors", lambda self: (right(self)[0], 1.01 * right(self)[1]))
    assert CliRunner().invoke(APP, WORDS).exit_code == 1
