"""`workbench simulate`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.cli import main

MODEL = ["--model", "shape:llama-3.1-8b", "--hardware", "h100"]


def test_it_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "azure", "--requests", "60", "--instances", "8", *MODEL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    asked = found["requests"]
    assert (asked["submitted"], asked["finished"], asked["failed"], asked["in_flight"]) == (60, 60, 0, 0)
    assert len(found["instances"]) == 8 and found["goodput"]["share"] == 1.0
    for name in ("ttft_s", "tpot_s", "e2el_s"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]


def test_it_is_read_by_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, %d]}'
    (tmp_path / "mine.jsonl").write_text("\n".join(line % number for number in range(1, 5)))
    words = ["simulate", str(tmp_path / "mine.jsonl"), *MODEL, "--router", "prefix_aware", "--prefix"]
    assert main([*words, "--decode-instances", "1", "--load", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 submitted, 4 finished" in out and "TTFT" in out and "goodput" in out and "16 output tokens" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.csv"], "trace 'nowhere.csv': there is no such file; name one, or azure or mooncake"),
        (["azur"], "did you mean 'azure'?"),
        (["azure", "--router", "best"], "executor.router"),
        (["azure", "--hardware", "b100"], "no hardware 'b100'; did you mean"),
        (["azure", "--load", "0"], "--load 0.0: must be above 0"),
        (["azure", "--set", "cache.page=3"], "cache.page"),
        (["azure", "--model", "shape:llama-3.1-70b"], "give more gpus"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err
