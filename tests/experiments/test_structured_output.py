"""Structured output as an experiment: every answer is valid, and one that is not is seen."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

from experiments import structured_output
from experiments.random_schemas import KINDS, count_ends, draw_schema, with_objects
from workbench import load
from workbench.constrained.answer import GrammarAnswer

APP = typer.Typer()
APP.command()(structured_output.main)


def run(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(APP, ["--rounds", "0", "--json", *words])
    return done.exit_code, json.loads(done.stdout)


def test_every_answer_is_valid() -> None:
    code, record = run("--schemas", str(len(KINDS)))
    assert code == 0 and set(record["kinds"]) == set(KINDS)
    assert record["verdict"]["answers"] == record["verdict"]["valid"] == 2 * len(KINDS)


def test_answers_that_are_not_closed_in_time_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarAnswer, "_fits", lambda self, way, left: True)
    code, record = run("--schemas", str(len(KINDS)))
    assert code == 1 and record["verdict"]["valid"] < record["verdict"]["answers"]


@pytest.mark.parametrize("seed", range(0, 300, 7))
def test_drawn_schemas_are_schemas(seed: int) -> None:
    jsonschema.Draft202012Validator.check_schema(draw_schema(seed)[1])
    assert draw_schema(seed) == draw_schema(seed)


def test_answers_that_end_by_themselves_are_counted() -> None:
    """A limit of one token leaves none that does; closed and open schemas differ in nothing else."""
    runner = load("demo-chat", backend="eager", prefix="radix")
    for most, ended in ((1, 0), (400, 1)):
        for counts in count_ends(runner, 3, most).values():
            assert counts["answers"] == 3 == counts["stop"] + counts["length"] + counts["refused"]
            assert min(counts["stop"], 1) == ended
    closed, opened = (with_objects(draw_schema(7)[1], each) for each in (True, False))
    assert "additionalProperties" not in json.dumps(opened) and with_objects(closed, closed=False) == opened != closed
