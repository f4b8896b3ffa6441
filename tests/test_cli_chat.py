"""`workbench chat`: answers stream, tools are carried out, and what is wrong is one line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.cli.chat import carry_out
from workbench.prompt.conversation import Conversation

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
    assert capsys.readouterr().err.count("of the prompt cached]") == 2


def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*CHAT, "a", "--tool", "no.such:thing"]) == 2
    assert "--tool no.such:thing: cannot be imported" in capsys.readouterr().err
    assert main([*CHAT, "a", "--model", "shape:smollm2-135m", "--tool", "tests.test_cli_chat:double"]) == 2
    assert "this model has no tokenizer" in capsys.readouterr().err
    assert main([*CHAT, "x " * 5000, "--overflow", "refuse"]) == 2
    assert "tokens, and 1,023 fit" in capsys.readouterr().err


def test_tools_are_carried_out_and_their_errors_are_results() -> None:
    talk = Conversation(tools=[double, fail], turns=["a"])
    assert carry_out(talk, "double", {"x": 3}) == "6"
    assert carry_out(talk, "fail", {}) == "error: RuntimeError: no luck"
    assert carry_out(talk, "dubble", {}) == "error: no tool is named 'dubble'; did you mean 'double'?"
    assert carry_out(talk, "double", {"y": 3}).startswith("error: TypeError: double() got an unexpected keyword")
