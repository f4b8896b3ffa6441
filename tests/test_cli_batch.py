"""`workbench batch`: what it prints, what it leaves, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.command_line import answer, cli
from tests.offline.batches import chat, line, written

MODEL = "batch --model demo-draft --set backend=eager --set cache.pages=8"
GOOD = [line(name, prompt="def f(", max_tokens=4, temperature=0) for name in "ab"]


def test_a_batch_and_the_same_again(tmp_path: Path) -> None:
    source, out = written([*GOOD, "{"], tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert "3 lines: 2 answered, 1 failed" in cli(MODEL, source, out, code=1).out  # one of its lines has an error
    before = out.read_bytes()
    answers = [json.loads(each) for each in before.splitlines()]
    assert [each["custom_id"] for each in answers] == ["a", "b", "line 3"]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == answers[1]["response"]["body"]["choices"][0]["text"]
    out.write_bytes(before[:-5])
    found = answer(MODEL, source, out, code=1)
    assert (found["lines"], found["already_written"], found["answered"], found["failed"]) == (3, 2, 2, 1)
    assert out.read_bytes() == before and found["truncated_bytes"] > 0
    written(GOOD, source)
    out.write_bytes(b"".join(before.splitlines(keepends=True)[:2]))
    assert "2 of them before; 0 prompt and 0 output tokens" in cli(MODEL, source, out).out


def test_answers_under_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    source, out = written(GOOD, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    cli(MODEL, source, out)
    before = out.read_bytes()
    for other in (
        "attention.sliding_window=16", "batch_invariant=true", "cache.format=int8", "model.seed=1",
        "schedule.overflow=cut_oldest", "speculate.kind=prompt_lookup",
    ):  # fmt: skip
        assert "under other settings" in cli(f"{MODEL} --set {other}", source, out, code=2).err
    assert out.read_bytes() == before
    cli(f"{MODEL} --set cache.page_size=8", source, out)


def test_the_demo_answers_chats(tmp_path: Path) -> None:
    """Its tokenizer has the control tokens of the workbench's own template, which a server takes too."""
    source, out = written([chat("a", "hi", max_tokens=4)], tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    cli(MODEL, source, out)
    assert json.loads(out.read_text())["response"]["body"]["object"] == "chat.completion"
