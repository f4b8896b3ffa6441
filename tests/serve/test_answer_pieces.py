"""Laws of the pieces of an answer: they do not depend on where the text was cut, and choices begin in their order."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.prompt.answers import AnswerFormat, parse_calls
from workbench.request import Request, SamplingParameters
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Ended, Piece, PromptRead, Text, Thought, ToolArguments, ToolCallBegun
from workbench.serve.answers.tool_call_text import ToolCallText
from workbench.serve.call import Call
from workbench.serve.served_model import PreparedPrompt
from workbench.trace.events import Decoded, Event, Finished, Prefilled, Verified

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.text("abcdef_", min_size=1, max_size=5), ARGUMENTS), min_size=1, max_size=3)


def gathered(text: str, cuts: list[int]) -> tuple[list[tuple[str, str]], str]:
    reader, found = ToolCallText(), {}
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.push(text[begin:end])
    last, rest = reader.finish()
    for part in [*parts, *last]:
        if part.name:
            found[part.index] = (part.name, "")
        found[part.index] = (found[part.index][0], found[part.index][1] + part.arguments)
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in sorted(found)], rest


@given(CALLS, st.booleans(), st.booleans(), st.booleans(), st.data())
@settings(max_examples=tries(150))
def test_calls_are_those_of_the_whole_text_wherever_it_is_cut(
    calls: list[tuple[str, Any]], is_list: bool, name_first: bool, is_spaced: bool, data: st.DataObject
) -> None:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if not name_first:
        objects = [dict(reversed(each.items())) for each in objects]
    written = objects if is_list else objects[0]
    text = json.dumps(written, ensure_ascii=data.draw(st.booleans()), indent=1 if is_spaced else None)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    found, rest = gathered(text, cuts)
    expected = [(call.name, call.arguments) for call in parse_calls(text)]
    assert [(name, json.loads(arguments)) for name, arguments in found] == expected and rest == ""


@pytest.mark.parametrize("value", ["\\", "a\\\\", '\\"', '"}, {"', "\\u0022"])
def test_signs_of_json_within_a_string_end_nothing(value: str) -> None:
    calls = [{"name": "f", "arguments": {"x": value, "y": n}} for n in range(2)]
    found, rest = gathered(json.dumps(calls), [])
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("f", each["arguments"]) for each in calls]
    assert rest == ""


@given(st.text('{}[]":,\\ abname1', max_size=30), st.data())
@settings(max_examples=tries(150))
def test_any_text_is_read_the_same_wherever_it_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert gathered(text, cuts) == gathered(text, [])


def sample_events(tokens: list[int], request_id: str, sample: int, reason: str = "max_tokens") -> list[Event]:
    events: list[Event] = [Decoded(0.0, request_id, sample=sample, token_id=id, index=n) for n, id in enumerate(tokens)]
    end = Finished(0.0, request_id, sample=sample, reason="length", token_ids=tuple(tokens), ended_by=reason)
    return [*events, end]


def test_without_a_tokenizer_each_token_is_shown_as_it_comes() -> None:
    call = Call("c", "openai.completions", "m", ((5, 6),), SamplingParameters(max_tokens=3))
    pieces = AnswerPieces(call, [PreparedPrompt(Request("r", (5, 6), call.sampling))], None)
    *tokens, end = sample_events([7, 8, 9], "r", 0)
    shown = [[piece for piece in pieces.push([event]) if isinstance(piece, Text)] for event in tokens]
    assert [[(each.text, each.token_ids) for each in found] for found in shown] == [[("", (id,))] for id in (7, 8, 9)]
    assert [type(piece) for piece in pieces.push([end])] == [Ended]


@given(st.integers(0, 5), st.integers(1, 6))
def test_draft_tokens_that_a_stop_cut_off_are_not_counted_as_accepted(accepted: int, shown: int) -> None:
    call = Call("c", "openai.completions", "m", ((5, 6),), SamplingParameters(max_tokens=99))
    pieces, shown = AnswerPieces(call, [PreparedPrompt(Request("r", (5, 6)))], None), min(shown, accepted + 1)
    pieces.push([Verified(0.0, "r", drafted=5, accepted=accepted), *sample_events([7] * shown, "r", 0, "stop_string")])
    used = pieces.used
    assert (used.accepted_tokens, used.drafted_tokens, used.completion_tokens) == (min(accepted, shown), 5, shown)


@given(st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=tries(40))
def test_choices_begin_in_their_order_however_events_come(
    chat_runner: Runner, prompts: int, n: int, draw: random.Random
) -> None:
    """Whatever the interleaving, nothing is lost and each choice begins after the one before it has."""
    assert chat_runner.tokenizer is not None and chat_runner.chat_template is not None
    format = AnswerFormat.from_template(chat_runner.chat_template, chat_runner.tokenizer)
    sampling = SamplingParameters(n=n)
    call = Call("c", "openai.chat", "m", ((1, 2),) * prompts, sampling)
    prepared = [PreparedPrompt(Request(f"c.{k}", (1, 2), sampling), format) for k in range(prompts)]
    texts = {k: f"answer {k}: {draw.randrange(1000)} <b> é" for k in range(prompts * n)}
    ids = {k: list(chat_runner.tokenizer.encode(text)) for k, text in texts.items()}
    queues = [sample_events(ids[p * n + s], f"c.{p}", s) for p in range(prompts) for s in range(n)]
    reader, found = AnswerPieces(call, prepared, chat_runner.tokenizer), []
    found += reader.push([Prefilled(0.0, f"c.{p}", tokens=1, computed=2) for p in range(prompts)])
    while waiting := [each for each in queues if each]:
        found += reader.push([draw.choice(waiting).pop(0)])
    order = list(dict.fromkeys(piece.choice for piece in found if not isinstance(piece, PromptRead)))
    assert order == list(range(prompts * n))
    for k, text in texts.items():
        mine = [piece for piece in found if piece.choice == k and not isinstance(piece, PromptRead)]
        assert "".join(piece.text for piece in mine if isinstance(piece, Text)) == text
        assert isinstance(mine[-1], Ended) and mine[-1].reason == "length"
    assert [piece.choice for piece in found if isinstance(piece, PromptRead)] == [p * n for p in range(prompts)]
    assert reader.used.prompt_tokens == 2 * prompts and reader.used.cached_tokens == prompts
    assert reader.used.completion_tokens == sum(len(chat_runner.tokenizer.encode(text)) for text in texts.values())


def test_a_thought_a_text_and_two_calls(chat_runner: Runner) -> None:
    assert chat_runner.tokenizer is not None and chat_runner.chat_template is not None
    tokenizer = chat_runner.tokenizer
    format = AnswerFormat.from_template(chat_runner.chat_template, tokenizer)
    calls = '<|tool|>{"name": "f", "arguments": {"a": 1}}<|tool|>{"name": "g", "arguments": {}}'
    ids = tokenizer.encode("<|think|>so<|/think|>yes" + calls, special=True)
    call = Call("c", "openai.chat", "m", ((1, 2),), SamplingParameters())
    reader = AnswerPieces(call, [PreparedPrompt(Request("c", (1, 2)), format)], tokenizer, new_id=iter("xy").__next__)
    found: list[Piece] = reader.push([*sample_events(ids, "c", 0, "eos")])
    assert "".join(each.text for each in found if isinstance(each, Thought)) == "so"
    assert "".join(each.text for each in found if isinstance(each, Text)) == "yes"
    assert [(e.index, e.id, e.name) for e in found if isinstance(e, ToolCallBegun)] == [(0, "x", "f"), (1, "y", "g")]
    arguments = ["", ""]
    for each in found:
        if isinstance(each, ToolArguments):
            arguments[each.index] += each.text
    assert arguments == ['{"a": 1}', "{}"]
