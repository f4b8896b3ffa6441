"""Answers by tokens: channels, calls, and JSON that parses wherever it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt.apply import MODELS, OWN
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.prompt.answers import AnswerFormat, AnswerParser, parse_answer, parse_calls, parse_partial_json
from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import MAX_ARGUMENT_DEPTH, ToolCall

TOKENIZER = byte_level()
assert OWN.chat_template is not None
FORMAT = AnswerFormat.from_template(OWN.chat_template, TOKENIZER)
TEXTS = st.text(st.sampled_from('ab é\n🙂<|>{}"'), max_size=8) | st.sampled_from(["<|tool|>", "<|/think|>"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 1) | TEXTS | st.sampled_from(["\\", '\\"', "\u2028"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)  # fmt: skip
CALLS = st.lists(
    st.builds(lambda v: ToolCall(name="f", arguments=v), st.dictionaries(TEXTS, VALUES, max_size=2)), max_size=2
)


@settings(max_examples=tries(200), deadline=None)
@given(thinking=st.none() | TEXTS, content=TEXTS, calls=CALLS)
def test_what_is_rendered_is_read_back(thinking: str | None, content: str, calls: list[ToolCall]) -> None:
    """Text that spells a control token stays text; the pieces of each channel join to the whole."""
    asked = Conversation(turns=["hi"])
    before = asked.prompt(OWN).ids
    ids = asked.answer(content, thinking, calls).prompt(OWN, add_generation_prompt=False).ids[len(before) :]
    turn = parse_answer(ids, TOKENIZER, FORMAT)
    assert (turn.content, turn.thinking, list(turn.tool_calls)) == (content, thinking, calls)
    assert turn.generated_ids == ids
    parser = AnswerParser(TOKENIZER, FORMAT)
    pieces = [piece for id in ids for piece in parser.push(id)] + parser.finish()
    assert "".join(each.text for each in pieces if each.channel == "thought") == (thinking or "")
    assert "".join(each.text for each in pieces if each.channel == "text") == content
    for number, call in enumerate(calls):
        shown = "".join(each.text for each in pieces if each.channel == "call" and each.index == number)
        assert parse_calls(shown) == [call]


@settings(max_examples=tries(200), deadline=None)
@given(value=st.dictionaries(TEXTS, VALUES, max_size=3) | st.lists(VALUES, max_size=3), ascii_only=st.booleans())
def test_json_parses_at_every_cut(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    for cut in range(1, len(text) + 1):
        assert isinstance(parse_partial_json(text[:cut]), type(value))
    assert parse_partial_json(text) == value and parse_partial_json("") is None


DEEP, VERY_DEEP = (
    f'{{"name": "f", "arguments": {{"x": {"[" * levels}{"]" * levels}}}}}' for levels in (60, 20_000)
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [ToolCall(name="f", arguments={"x": 1})]),
        ('[{"name": "f"}, {"name": "g", "arguments": "{\\"x\\": 2}"}]',
         [ToolCall(name="f"), ToolCall(name="g", arguments={"x": 2})]),
        ('{"name": "f", "arguments": {"x": ', 
         [ToolCall(name="f", arguments={"unparsed": '{"name": "f", "arguments": {"x": '})]),
        ('{"name": "f", "arguments": [1]}', [ToolCall(name="f", arguments={"unparsed": "[1]"})]),
        ('{"name": "f", "arguments": null}', [ToolCall(name="f")]),
        *((words + end, [ToolCall(name="f", arguments={"unparsed": said})]) for words, end, said in (
            ('{"name": "f", "arguments": {"x": 1e999}', "}", '{"x": Infinity}'), ('f{"x": 1e999}', "", '{"x": 1e999}'),
            ("<function=f>\n<parameter=x>\n1e999\n</parameter>\n", "</function>", '{"x": Infinity}'),
        )),
        (DEEP, [ToolCall(name="f", arguments={"unparsed": DEEP})]),
        (VERY_DEEP, []),
        ('{"x": 1}', []), ("f(1)", []), ("[1, 2]", []), ("3", []),
    ],
)  # fmt: skip
def test_calls_of_several_shapes(text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text) == calls


def test_a_call_that_is_none_is_text_and_the_rest_is_kept() -> None:
    ids = TOKENIZER.encode("a<|tool|>b<|turn|>", special=True)
    turn = parse_answer(ids, TOKENIZER, FORMAT)
    assert (turn.content, turn.tool_calls) == ("ab", ())


def test_tags_that_are_no_special_tokens() -> None:
    """Qwen's: the template writes them, so they are control tokens; a line ends before a call."""
    model = MODELS["thought_dropped"]
    assert model.tokenizer is not None and model.chat_template is not None
    format = AnswerFormat.from_template(model.chat_template, model.tokenizer)
    text = '<think>\nhm\n</think>\n\nyes\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    text += '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>'
    ids = model.tokenizer.encode(text, special=True)
    turn = parse_answer(ids, model.tokenizer, format)
    assert turn.thinking == "\nhm\n" and turn.content == "\n\nyes"
    assert turn.tool_calls == (ToolCall(name="f", arguments={"x": 1}), ToolCall(name="g"))
    talk = Conversation(turns=["hi"]).with_turn(turn).result("1").result("2")
    assert talk.prompt(model).answers == {1: "kept"}
    cut = parse_answer(model.tokenizer.encode("so</think>a", special=True), model.tokenizer, format, in_thought=True)
    assert (cut.thinking, cut.content) == ("so", "a")
    opened = model.tokenizer.encode("<think>a</think>b<think>\n", special=True)
    assert format.ends_in_thought(opened) and not format.ends_in_thought(opened[:-2])
    assert not AnswerFormat().ends_in_thought(opened)


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"x": value}])
def test_arguments_are_kept_to_the_depth_that_templates_read(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_ARGUMENT_DEPTH - 1):
        value = wrap(value)
    text = json.dumps({"x": value})
    assert ToolCall.parse("f", text).arguments == {"x": value}
    deeper = json.dumps({"x": wrap(value)})
    assert ToolCall.parse("f", deeper).arguments == {"unparsed": deeper}


def test_stop_strings_end_texts_and_no_thoughts() -> None:
    parser = AnswerParser(TOKENIZER, FORMAT, stops=("END",))
    ids = TOKENIZER.encode("<|think|>a END b<|/think|>c END", special=True)
    pieces = [piece for id in ids for piece in parser.push(id)] + parser.finish()
    shown = {name: "".join(each.text for each in pieces if each.channel == name) for name in ("thought", "text")}
    assert shown == {"thought": "a END b", "text": "c "}
