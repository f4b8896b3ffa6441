"""`workbench batch`: what it prints, what it leaves, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.offline.batches import chat, line, written
from workbench.cli import main

MODEL = ["--model", "demo-draft", "--set", "cache.pages=8"]
GOOD = [line(name, prompt="def f(", max_tokens=4, temperature=0) for name in "ab"]


def test_a_batch_and_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = written([*GOOD, "{"], tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(out), *MODEL]) == 1  # one of its lines has an error
    assert "3 lines: 2 answered, 1 failed" in capsys.readouterr().out
    before = out.read_bytes()
    answers = [json.loads(each) for each in before.splitlines()]
    assert [each["custom_id"] for each in answers] == ["a", "b", None]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == answers[1]["response"]["body"]["choices"][0]["text"]
    out.write_bytes(before[:-5])
    assert main(["batch", str(source), str(out), *MODEL, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["lines"], found["already_written"], found["answered"], found["failed"]) == (3, 2, 2, 1)
    assert out.read_bytes() == before and found["truncated_bytes"] > 0
    written(GOOD, source)
    out.write_bytes(b"".join(before.splitlines(keepends=True)[:2]))
    assert main(["batch", str(source), str(out), *MODEL]) == 0
    assert "2 of them before; 0 prompt and 0 output tokens" in capsys.readouterr().out


def test_the_demo_has_no_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = written([chat("a", "hi")], tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(out), *MODEL]) == 1
    assert "has no chat template" in out.read_text()


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["none.jsonl", "out.jsonl"], "batch none.jsonl: cannot be read"),
        (["in.jsonl", "in.jsonl"], "must go to another file"),
        (["in.jsonl", "no/out.jsonl"], "output no/out.jsonl: cannot be written"),
        (["in.jsonl", "out.jsonl", "--set", "cache.page=3"], "cache.page: unknown key"),
        (["in.jsonl", "out.jsonl", "--model", "unknown"], "no model 'unknown'"),
        (["in.jsonl", "out.jsonl", "--backend", "fast"], "fast"),
        (["in.jsonl", "old.jsonl"], "line 1: answers another batch"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(GOOD, Path("in.jsonl"))
    Path("old.jsonl").write_text('{"id": "batch_req_0", "error": null}\n')
    assert main(["batch", *words]) == 2
    out, err = capsys.readouterr()
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert out == "" and len(errors) == 1 and wrong in errors[0]
    assert Path("in.jsonl").read_text().count("\n") == 2 and Path("old.jsonl").read_text().count("\n") == 1
