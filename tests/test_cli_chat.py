"""`workbench chat` and `workbench agent`: answers stream, and tools are carried out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.command_line import answer, cli
from workbench.cli import agent_output

CHAT = "chat --model demo --set backend=eager --max-tokens 4 --temperature 0"
AGENT = "agent a --model demo --set backend=eager"


def double(x: int) -> int:
    """Double a number."""
    return 2 * x


def fail() -> int:
    """Fail."""
    raise RuntimeError("no luck")


@pytest.mark.parametrize(("is_terminal", "environment"), [(True, {}), (False, {}), (True, {"NO_COLOR": ""})])
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, environment: dict[str, str]
) -> None:
    monkeypatch.setattr(agent_output, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(agent_output, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: is_terminal)))
    assert agent_output._is_coloured() == (is_terminal and not environment)


def test_each_question_has_its_answer() -> None:
    lines = cli(f"{CHAT} one 'two <|turn|>' --json --system", "S " * 30).out.splitlines()
    first, second = (json.loads(each)["usage"] for each in lines)
    assert first["output_tokens"] <= 4
    known = first["prompt_tokens"] + first["output_tokens"]
    assert second["prompt_tokens"] > known > 32 and second["cached_tokens"] >= (known - 1) // 16 * 16
    assert second["computed_tokens"] == second["prompt_tokens"] - second["cached_tokens"]


def test_lines_of_the_input_are_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert cli(CHAT).out.count(" prompt tokens, ") == 2


def test_a_conversation_that_does_not_fit_is_refused() -> None:
    assert "tokens, and 1,023 fit" in cli(CHAT, "x " * 5000, "--set", "schedule.overflow=refuse", code=2).err


def test_a_tool_is_called_and_its_result_is_a_line() -> None:
    tools = "--tool tests.test_cli_chat:double --set tool_choice=double --set limits.rounds=2 --max-tokens 40 --system"
    run = answer(f"{AGENT} {tools}", "one two three " * 30)
    (made,) = run["rounds"][0]["calls"]
    assert made["name"] == "double" and made["result"] == str(2 * made["arguments"]["x"])
    assert [turn["role"] for turn in run["turns"]][:3] == ["user", "assistant", "tool"]
    second = run["rounds"][1]["usage"]
    assert second["cached_tokens"] > 0
    assert second["cached_tokens"] + second["computed_tokens"] == second["prompt_tokens"]


def test_an_agents_rounds_are_shown() -> None:
    settings = "--set tool_choice=required --set limits.rounds=1 --set parallel_tool_calls=false"
    out = cli(f"{AGENT} --tool tests.test_cli_chat:fail --max-tokens 30 {settings}").out
    assert "→ fail({})\n← fail: error: no luck\n" in out and "[ended: max_rounds]" in out
    assert "[demo, round 0: " in out and "cached" in out


def test_a_schema_and_a_thought(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}')
    settings = "--set backend=eager --set sampling.thinking.budget_tokens=3"
    line = answer(f"chat a --model demo {settings} --max-tokens 9 --schema", file)
    assert json.loads(line["answer"]) in ("yes", "no") and line["usage"]["thinking_tokens"] <= 3
