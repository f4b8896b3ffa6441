"""The judge of demo-chat: a model that writes the reference is right in everything, and each fault is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import chat_quality, chat_rounds
from experiments.chat_conversations import DECLARATIONS, KINDS, NO_CALLS, ChatSample, draw
from experiments.chat_exchanges import Call
from experiments.chat_format import chat_tokenizer
from experiments.chat_quality import Score, holds, meaning, summary
from experiments.chat_rounds import Chat, Reply, fits
from experiments.train_demo import DEMO
from tests.thorough import tries
from workbench.prompt.tokenizer import Tokenizer

TOKENIZER = Tokenizer(chat_tokenizer(DEMO / "target" / "tokenizer.json"))
RUNNER: Any = SimpleNamespace(tokenizer=TOKENIZER)
CALL = '<|tool|>{"name": "lookup", "arguments": {"name": "json.dumps"}}<|turn|>'


class Script:
    """Writes given replies in place of a model, as `chat_rounds._continue` does."""

    def __init__(self, replies: list[str]):
        self.replies = replies

    def __call__(self, runner, chats: list[Chat], max_tokens: int, stop: str, grammar: bool = False) -> list[list[int]]:
        return [TOKENIZER.encode(self.replies.pop(0), special=True)[:max_tokens] for _ in chats]


def reference(sample: ChatSample) -> list[str]:
    """Return what a perfect model writes for a sample: its thoughts, closed, and the rest of its turns."""
    written = []
    for message in sample.messages():
        if message["role"] == "assistant":
            if sample.thinking:
                written.append(message["reasoning_content"] + "<|/think|>")
            calls = [f"<|tool|>{json.dumps(call['function'])}" for call in message.get("tool_calls", ())]
            written.append("".join([message["content"], *calls, "<|turn|>"]))
    return written


@settings(max_examples=tries(60), deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.booleans())
def test_the_reference_is_right_and_breaks_nothing(kind: str, seed: int, thinking: bool) -> None:
    sample = draw("held_out", seed, kind, thinking)
    with pytest.MonkeyPatch.context() as patch:
        script = Script(reference(sample))
        patch.setattr(chat_rounds, "_continue", script)
        chat = chat_rounds.start(RUNNER, sample.system, sample.declarations)
        for exchange in sample.exchanges:
            chat_rounds.ask(RUNNER, [chat], [exchange.question], 256 if thinking else 0)
            score = Score(kind, 0, False)
            score.add(exchange, chat.reply)
            assert (score.tool, score.arguments, score.answer) == (1, 1, 1), score.misses
            assert not score.violations and not score.misses
        assert script.replies == []


def reply_to(*replies: str) -> Reply:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_rounds, "_continue", Script([*replies]))
        chat = chat_rounds.start(RUNNER, "", list(DECLARATIONS.values()))
        chat_rounds.ask(RUNNER, [chat], ["What does json.dumps do?"], 0)
    return chat.reply


@pytest.mark.parametrize(
    "written, violation",
    [
        ("An answer without end", "turn not ended"),
        ("<|turn|>", "nothing said"),
        ("a<|user|>b<|turn|>", "control token out of place"),
        ("<|think|>a<|/think|>b<|turn|>", "control token out of place"),
        ("Let me see." + CALL, "text beside a call"),
        ("<|tool|>lookup json.dumps<|turn|>", "call is no JSON of a call"),
        ("<|tool|>[1]<|turn|>", "call is no JSON of a call"),
        ('<|tool|>{"name": "search", "arguments": {}}<|turn|>', "call of an unknown tool"),
        ('<|tool|>{"name": "lookup", "arguments": {}, "id": 1}<|turn|>', "call of an unknown tool"),
        ('<|tool|>{"name": "lookup", "arguments": {"names": "a"}}<|turn|>', "arguments against the declaration"),
        ('<|tool|>{"name": "lookup", "arguments": "a"}<|turn|>', "arguments against the declaration"),
    ],
)
def test_each_break_of_the_format_is_counted_once(written: str, violation: str) -> None:
    reply = reply_to(*([written, "Done.<|turn|>"] if "<|tool|>" in written else [written]))
    assert reply.violations == {violation: 1}


def test_calls_without_end_are_stopped() -> None:
    reply = reply_to(*[CALL] * chat_rounds.MAX_ROUNDS)
    assert reply.violations == {"no answer in so many rounds": 1} and len(reply.rounds) == chat_rounds.MAX_ROUNDS


@pytest.mark.parametrize(
    "answer, text, held",
    [
        ("12 * 7 = 84.", "84", True), ("12 * 7 = 840.", "84", False), ("It is 184.", "84", False),
        ("It is 84.5.", "84", False), ("It is 84.", "84.5", False), ("= -84.", "84", False), ("= -84.", "-84", True),
        ("3 weeks = 1814400 seconds.", "1814400", True), ("json.dumps: Serialize obj.", "Serialize obj.", True),
        ("84", "84", True), ("2.84", "84", False),
    ],
)  # fmt: skip
def test_an_answer_holds_a_whole_number(answer: str, text: str, held: bool) -> None:
    assert holds(answer, text) is held


def test_calls_that_mean_the_same_are_the_same() -> None:
    def calculate(expression: str) -> str:
        return meaning(Call("calculate", {"expression": expression}))

    def convert(value: float, unit: str, to: str) -> str:
        return meaning(Call("convert", {"value": value, "unit": unit, "to": to}))

    assert calculate("12 * 7") == calculate("7*12") != calculate("84 * 1") != calculate("84")
    assert convert(3, "week", "s") == convert(3.0, "weeks", "seconds") != convert(3, "weeks", "minutes")
    assert convert(3, "weeks", "seconds") != convert(4, "weeks", "seconds") and convert(1, "nothing", "m")


def test_arguments_have_every_property_of_its_type_and_no_other() -> None:
    properties = DECLARATIONS["convert"]["function"]["parameters"]["properties"]
    good = {"value": 3, "unit": "weeks", "to": "days"}
    assert fits(good, properties) and fits({**good, "value": 2.5}, properties)
    for bad in ({}, {**good, "x": 1}, {**good, "value": "3"}, {**good, "value": True}, {**good, "to": 1}, [], None):
        assert not fits(bad, properties)


def test_shares_are_over_the_questions_that_tools_answer() -> None:
    scores = [Score(kind, 0, False, asked=10, tool=9, arguments=8, answer=7) for kind in ("convert", "lookup")]
    scores += [Score(kind, 0, False, asked=10) for kind in NO_CALLS]
    assert summary(scores) == {"thinking 0": {"tool": 0.9, "arguments": 0.8, "answer": 0.7}}
    assert chat_quality.table([vars(score) for score in scores]).text()
