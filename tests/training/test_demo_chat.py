"""demo-chat as it ships: its folder is what the recipe writes and the card describes, and it answers through the agent.

Questions are ones that it answers by a clear margin, so that the instruction set does not decide.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import workbench
from experiments.chat_format import CHAT, CONFIG, chat_tokenizer, save_format
from tests.engine.tiny import layer, model_of, runner_of, spec_of
from tools.training import chat_card
from tools.training.chat_quality import GOALS
from tools.training.train_chat import ChatRecipe
from workbench.agents import demo_tools
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.engine.runner import Runner

CARD = CHAT / "card.json"
TOOLS = [demo_tools.calculate, demo_tools.convert, demo_tools.lookup]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return workbench.load("demo-chat", backend="eager", dtype="float32", prefix="radix", page_size=16)


def test_its_folder_is_what_the_recipe_writes(tmp_path: Path) -> None:
    assert BUNDLED_MODELS["demo-chat"] == CHAT
    save_format(tmp_path, chat_tokenizer(BUNDLED_MODELS["demo"] / "tokenizer.json"))
    for written in tmp_path.iterdir():
        assert (CHAT / written.name).read_text() == written.read_text(), written.name
    assert sum(file.stat().st_size for file in CHAT.iterdir()) <= 20_000_000
    assert json.loads((CHAT / "tokenizer_config.json").read_text())["eos_token"] == CONFIG["eos_token"]


def test_the_card_is_of_these_weights() -> None:
    card = json.loads(CARD.read_text())
    assert card["weights_sha256"] == hashlib.sha256((CHAT / "model.safetensors").read_bytes()).hexdigest()
    text = (CHAT / "README.md").read_text()
    for setting, values in card["summary"].items():
        assert f"| {setting} | " + " | ".join(f"{values[goal]:.1%}" for goal in GOALS) in text
    met = all(values[name] >= goal for values in card["summary"].values() for name, goal in GOALS.items())
    assert card["met"] is met and f"were\n{'met' if met else 'missed'}" in text


def test_the_card_is_written_from_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((chat_card.RECORDS / json.loads(CARD.read_text())["record"]).read_text())
    point = dict.fromkeys(
        ("tokens", "seconds", "tokens_per_second", "training_loss", "held_out_loss", "turns_right"), 1
    )
    (tmp_path / "curve.jsonl").write_text(json.dumps(point) + "\n")
    (tmp_path / "model.safetensors").write_bytes(b"0")
    monkeypatch.setattr(chat_card, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(chat_card.chat_quality, "measure", lambda *_: record)
    monkeypatch.setattr(chat_card.demo_quality, "bits_per_byte", lambda *_: 1.25)
    monkeypatch.setattr(chat_card.workbench, "load", lambda *_, **__: runner_of(model_of(spec_of(layer()))))
    assert chat_card.write(tmp_path, tmp_path, ChatRecipe(), 1).startswith("goals missed: ")
    card, shipped = json.loads((tmp_path / "card.json").read_text()), json.loads(CARD.read_text())
    assert {name: card[name] for name in ("goals", "summary", "weights_sha256")} == {
        name: shipped[name] for name in ("goals", "summary", "weights_sha256")
    }
    assert json.loads((tmp_path / "records" / card["record"]).read_text())["rows"] == record["rows"]
    written, text = (tmp_path / "README.md").read_text(), (CHAT / "README.md").read_text()
    table = text[text.index("| questions |") : text.index("On one held-out module")]
    assert table in written and card["record"] in written


@pytest.mark.parametrize(
    ("question", "calls", "answer"),
    [
        ("What is 127 * 43?", [["calculate"]], "5461"),
        ("How many seconds are 3 weeks and 2 days?", [["convert", "convert"], ["calculate"]], "1987200"),
        ("What does json.dumps do?", [["lookup"]], "Serialize"),
        ("Good morning", [], "How can I help?"),
    ],
)
@pytest.mark.parametrize("budget", [0, 64])
def test_it_calls_tools_and_answers(
    runner: Runner, question: str, calls: list[list[str]], answer: str, budget: int
) -> None:
    thinking = {"budget_tokens": budget} if budget else None
    made = workbench.agent(runner, TOOLS, temperature=0, max_tokens=160, thinking=thinking)
    result = made.run(question)
    assert [[call.name for call in each.calls] for each in result.rounds if each.calls] == calls
    assert answer in result.answer and result.stop_reason == "end_turn"
    assert not any(call.error for each in result.rounds for call in each.calls)
    assert (result.usage.thinking_tokens > 0) == bool(budget)
    for before, after in zip(result.rounds, result.rounds[1:], strict=False):
        there = before.usage.prompt_tokens + before.usage.output_tokens - 1
        assert there - after.usage.cached_tokens < 16
