"""`workbench chat`: answers stream, tools are carried out, and what is wrong is one line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from workbench.cli import main

CHAT = ["chat", "--backend", "eager", "--max-tokens", "4", "--temperature", "0"]


def double(x: int) -> int:
    """Double a number."""
    return 2 * x


def fail() -> int:
    """Fail."""
    raise RuntimeError("no luck")


def test_each_question_has_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, "one", "two <|turn|>", "--system", "S", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["role"] == second["role"] == "assistant" and first["output_tokens"] <= 4
    assert second["prompt_tokens"] > first["prompt_tokens"]


def test_lines_of_the_input_are_questions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(CHAT) == 0
    assert capsys.readouterr().out.count("of prompt, ") == 2


def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*CHAT, "a", "--tool", "no.such:thing"]) == 2
    assert "--tool no.such:thing: cannot be imported" in capsys.readouterr().err
    assert main([*CHAT, "a", "--model", "shape:smollm2-135m", "--tool", "tests.test_cli_chat:double"]) == 2
    assert "this model has no tokenizer" in capsys.readouterr().err
    assert main([*CHAT, "x " * 5000, "--overflow", "refuse"]) == 2
    assert "tokens, and 1,023 fit" in capsys.readouterr().err


def test_a_tool_is_called_and_its_result_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    tools = ["--tool", "tests.test_cli_chat:double", "--tool-choice", "double", "--max-rounds", "2"]
    options = ["--system", "one two three " * 30, "--max-tokens", "40", "--backend", "eager", "--json"]
    assert main(["agent", "a", "--model", "demo", *tools, *options]) == 0
    run = json.loads(capsys.readouterr().out)
    (made,) = run["rounds"][0]["calls"]
    assert made["name"] == "double" and made["result"] == str(2 * made["arguments"]["x"])
    assert [turn["role"] for turn in run["turns"]][:3] == ["user", "assistant", "tool"]
    second = run["rounds"][1]["usage"]
    assert (
        second["cached_tokens"] > 0 and second["cached_tokens"] + second["computed_tokens"] == second["prompt_tokens"]
    )


def test_an_agents_rounds_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    tools = ["--tool", "tests.test_cli_chat:fail", "--tool-choice", "required", "--max-rounds", "1", "--no-parallel"]
    assert main(["agent", "a", "--model", "demo", *tools, "--max-tokens", "30", "--backend", "eager"]) == 0
    out = capsys.readouterr().out
    assert "→ fail({})\n← fail: error: no luck\n" in out and "[ended: max_rounds]" in out
    assert "[round 0: " in out and "cached" in out


def test_a_schema_and_a_thought(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}')
    options = ["--schema", str(file), "--thinking", "3", "--max-tokens", "9", "--json"]
    assert main(["chat", "--backend", "eager", "a", *options]) == 0
    line = json.loads(capsys.readouterr().out)
    assert json.loads(line["content"]) in ("yes", "no") and line["thinking_tokens"] <= 3
    file.write_text("{")
    assert main(["chat", "--backend", "eager", "a", *options]) == 2
    assert "schema.json: is no JSON" in capsys.readouterr().err
    assert main(["chat", "a", "--schema", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main([*CHAT, "a", "--tool", "json:dump5"]) == 2
    assert "json has no 'dump5'" in capsys.readouterr().err
