"""The judge of demo-chat: a model that writes the reference is right in everything, and each fault is counted."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from experiments.chat_conversations import DECLARATIONS, KINDS, NO_CALLS, ChatSample, draw
from experiments.chat_exchanges import TOOLS, Call
from experiments.chat_format import chat_tokenizer
from tests.thorough import tries
from tools.training import chat_quality, chat_rounds
from tools.training.chat_quality import Score, meaning, summary
from tools.training.chat_rounds import Reply
from tools.training.train_demo import DEMO
from workbench.agents.arguments import find_fault
from workbench.constrained.grammar import Grammar, GrammarVocabulary
from workbench.prompt.conversation import Conversation
from workbench.prompt.own_template import own_template
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request

TOKENIZER = Tokenizer(chat_tokenizer(DEMO / "target" / "tokenizer.json"))
VOCABULARY = GrammarVocabulary(TOKENIZER)
RUNNER: Any = SimpleNamespace(tokenizer=TOKENIZER, chat_template=own_template(TOKENIZER))
CALL = '<|tool|>{"name": "lookup", "arguments": {"name": "json.dumps"}}<|turn|>'


class Script:
    """Writes given replies in place of a model, as `chat_rounds._continue` does."""

    def __init__(self, replies: list[str]):
        self.replies = replies

    def __call__(self, runner: Any, requests: list[Request]) -> list[list[int]]:
        return [TOKENIZER.encode(self.replies.pop(0), special=True) for _ in requests]


def reference(sample: ChatSample) -> list[str]:
    """Return what a perfect model writes for a sample: its thoughts, closed, and the rest of its turns."""
    written = []
    for message in sample.messages():
        if message["role"] == "assistant":
            thought = [message["reasoning_content"], "<|/think|>"] if sample.thinking else []
            calls = [f"<|tool|>{json.dumps(call['function'])}" for call in message.get("tool_calls", ())]
            written.append("".join([*thought, message["content"], *calls, "<|turn|>"]))
    return written


@settings(max_examples=tries(60))
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.booleans())
def test_the_reference_is_right_and_breaks_nothing(kind: str, seed: int, thinking: bool) -> None:
    sample = draw("held_out", seed, kind, thinking)
    tools = [TOOLS[name] for name in sample.tools]
    with pytest.MonkeyPatch.context() as patch:
        script = Script(reference(sample))
        patch.setattr(chat_rounds, "_continue", script)
        chat = chat_rounds.start(RUNNER, sample.system, tools, 256 if thinking else 0)
        for exchange in sample.exchanges:
            chat_rounds.ask(RUNNER, [chat], [exchange.question])
            score = Score(kind, 0, False)
            score.add(exchange, chat.reply)
            assert (score.tool, score.arguments, score.answer) == (1, 1, 1), score.misses
            assert not score.violations and not score.misses
        assert script.replies == []


@cache
def grammar_of(tools: tuple[str, ...]) -> Grammar:
    made = workbench.agent(RUNNER, [TOOLS[name] for name in tools])
    talk = Conversation(tools=made.tools, turns=["?"])
    return VOCABULARY.compile(made.sampling_of(talk, made.answer_format(made.tools), None)["response_format"])


@settings(max_examples=tries(30))
@given(st.integers(0, 10**6))
def test_the_grammar_of_an_agent_admits_every_reference(seed: int) -> None:
    sample = draw("held_out", seed, thinking=False)
    for reply in reference(sample) if sample.tools else ():
        ids = TOKENIZER.encode(reply, special=True)[:-1]  # without the end of the turn
        assert grammar_of(sample.tools).tokens.deep_copy().validate_tokens(ids) == len(ids)


def reply_to(*replies: str) -> Reply:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_rounds, "_continue", Script([*replies]))
        chat = chat_rounds.start(RUNNER, "", list(TOOLS.values()))
        chat_rounds.ask(RUNNER, [chat], ["What does json.dumps do?"])
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


def test_calls_that_mean_the_same_are_the_same() -> None:
    def calculate(expression: str) -> str:
        return meaning(Call("calculate", {"expression": expression}))

    def convert(value: float, unit: str, to: str) -> str:
        return meaning(Call("convert", {"value": value, "unit": unit, "to": to}))

    assert calculate("12 * 7") == calculate("7*12") != calculate("84 * 1") != calculate("84")
    assert convert(3, "week", "s") == convert(3.0, "weeks", "seconds") != convert(3, "weeks", "minutes")
    assert convert(3, "weeks", "seconds") != convert(4, "weeks", "seconds") and convert(1, "nothing", "m")


def test_arguments_have_every_property_of_its_type_and_no_other() -> None:
    schema = DECLARATIONS["convert"]["function"]["parameters"]
    good = {"value": 3, "unit": "weeks", "to": "days"}
    assert not find_fault(good, schema) and not find_fault({**good, "value": 2.5}, schema)
    for bad in ({}, {**good, "x": 1}, {**good, "value": "3"}, {**good, "value": True}, {**good, "to": 1}, [], None):
        assert find_fault(bad, schema)


def test_shares_are_over_the_questions_that_tools_answer() -> None:
    scores = [Score(kind, 0, False, asked=10, tool=9, arguments=8, answer=7) for kind in ("convert", "lookup")]
    scores += [Score(kind, 0, False, asked=10) for kind in NO_CALLS]
    assert summary(scores) == {"thinking 0": {"tool": 0.9, "arguments": 0.8, "answer": 0.7}}
    scores[0].violations["turn not ended"] += 2
    rows = json.loads(json.dumps([score.as_row() for score in scores]))
    assert chat_quality.table(rows).text() and rows[0]["violations"] == {"turn not ended": 2}
    assert ["turn not ended", "2", "0"] in [[*row] for row in chat_quality.violations(rows).rows]
