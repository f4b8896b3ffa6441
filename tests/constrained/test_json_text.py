"""Answers of JSON end: white space as `json.dumps` has it, digits bounded, dates that readers take, strict objects."""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.constrained.answer import GrammarAnswer
from workbench.constrained.grammar import GrammarVocabulary
from workbench.constrained.json_closed import answer_of
from workbench.errors import WorkbenchError
from workbench.response_format import JSONSchema, Lark, ResponseFormat
from workbench.serve.bodies.fields import read_body
from workbench.serve.call import Caller
from workbench.serve.dialects.openai.chat import OpenAIChat
from workbench.serve.dialects.responses.responses import OpenAIResponses

MAX_DIGITS_SAID = 20  # digits one after another


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(byte_level())


def admits(form: ResponseFormat, text: str) -> bool:
    """Return whether the grammar has a text as a whole answer."""
    symbols = [*text.encode(), vocabulary().end_symbol]
    return vocabulary().compile(form).symbols.validate_tokens(symbols) == len(symbols)


def said(form: ResponseFormat, wanted: str, others: str = '}]",:. tfn', most: int = 300) -> str:
    """Return the answer of a model that wants characters of `wanted` above all, and else the first it may say."""
    tokenizer, size = byte_level(), vocabulary().size
    end = tokenizer.special_token_ids["<|end|>"]
    rank = {tokenizer.encode(each)[0]: place for place, each in enumerate(wanted + others)}
    answer, text = GrammarAnswer(vocabulary().compile(form), [end], size, most), b""
    while answer.left:
        token = min(np.flatnonzero(~answer.banned()[0]).tolist(), key=lambda id: (rank.get(id, 99), id))
        taken, reason = answer.advance(token)
        if taken is None or taken == end:
            break
        text += tokenizer.token_bytes(taken)
        if reason is not None:
            break
    return text.decode()


NUMBERS: list[Any] = [
    {"type": "number"}, {"type": "integer"}, {"type": ["number", "null"]}, {"type": "number", "minimum": 0}, {},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", NUMBERS, ids=json.dumps)
@pytest.mark.parametrize("wanted", ["10", "1.0", "9e-0", "-.5"])
def test_a_number_ends_however_much_a_model_repeats_a_digit(schema: dict, wanted: str) -> None:
    text = said(JSONSchema(json_schema=schema), wanted)
    assert max(map(len, re.findall(r"\d+", re.sub(r'"[^"]*"', "", text))), default=0) <= MAX_DIGITS_SAID
    if schema != {}:
        json.loads(text)


def test_no_number_of_a_grammar_s_own_and_no_text_is_bounded() -> None:
    """Say what the schema names; digits of strings are no number."""
    long = 1e-5 * 1.2345678901234567
    assert said(JSONSchema(json_schema={"enum": [long]}), "0.").startswith("0.0000123456789012345")
    digits = JSONSchema(json_schema={"type": "string", "pattern": "^[0-9]{30,40}$"})
    assert said(digits, "7") == f'"{"7" * 40}"'
    assert said(JSONSchema(json_schema={"type": "string", "pattern": "^[0-9]+\\.$", "maxLength": 50}), "7")[30] == "7"
    assert said(JSONSchema(json_schema={"type": "string"}), "7", most=50).startswith('"' + "7" * 40)
    beside = Lark(lark='start: /[a-z0-9]*/ "=" obj\nobj: %json {"type": "integer"}')
    assert said(beside, "7", "=").startswith("7" * 40)
    assert said(Lark(lark='start: "=" obj\nobj: %json {"type": "integer"}'), "=7") == "=" + "7" * MAX_DIGITS_SAID


LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3), max_leaves=6
)


@given(VALUES)
@settings(max_examples=tries(60))
def test_white_space_is_that_of_json_dumps(value: Any) -> None:
    form = JSONSchema(json_schema={})
    text = json.dumps(value, ensure_ascii=False)
    assert admits(form, text)
    for other in (json.dumps(value, indent=1), json.dumps(value, separators=(",", ":")), f" {text}", f"{text}\n"):
        assert admits(form, other) == (other == text)
    spread = json.dumps(value, ensure_ascii=False, indent=1)
    assert admits(JSONSchema(json_schema={}, max_whitespace=64), spread)


READERS: dict[str, Any] = {"date": date.fromisoformat, "time": time.fromisoformat, "date-time": datetime.fromisoformat}


def is_read(name: str, text: str) -> bool:
    try:
        READERS[name](text)
    except ValueError:
        return False
    return True


@given(
    st.integers(0, 9999) | st.sampled_from([0, 1900, 2000, 2023, 2024]), st.integers(0, 13), st.integers(0, 32),
    st.integers(0, 25), st.integers(0, 61), st.integers(0, 61), st.sampled_from(["", ".5", ".123456789"]),
    st.sampled_from(["Z", "+00:00", "-23:59", "+24:00", "z+"]),
)  # fmt: skip
@settings(max_examples=tries(150))
@example(2024, 5, 6, 14, 27, 60, "", "Z")
@example(2023, 2, 29, 14, 27, 0, "", "Z")
@example(0, 1, 1, 14, 27, 0, "", "Z")
def test_dates_and_times_are_those_that_readers_take(
    year: int, month: int, day: int, hour: int, minute: int, second: int, fraction: str, zone: str
) -> None:
    whole = f"{year:04}-{month:02}-{day:02}", f"{hour:02}:{minute:02}:{second:02}{fraction}{zone}"
    for name, text in zip(READERS, (*whole, "T".join(whole)), strict=True):
        assert admits(JSONSchema(json_schema={"type": "string", "format": name}), f'"{text}"') == is_read(name, text)


A: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: Any = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
STRICT: dict[str, tuple[Any, str, str]] = {
    "object": (A, '{"a": 1}', '{"a": 1, "gender": 2}'),
    "within": ({"type": "array", "items": A}, '[{"a": 1}]', '[{"a": 1, "b": 1}]'),
    "allOf": ({"allOf": [A, B]}, '{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 3}'),
    "reference and more": ({"$defs": {"A": A}, **B, "$ref": "#/$defs/A"}, '{"b": 2, "a": 1}',
                           '{"b": 2, "a": 1, "c": 3}'),
    "branches": ({"anyOf": [A, B]}, '{"b": 2}', '{"b": 2, "c": 1}'),
    "branches and more": ({**B, "anyOf": [A, {"required": ["b"]}]}, '{"b": 2, "a": 1}', '{"b": 2, "a": 1, "c": 1}'),
    "itself": ({"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "type": "object"}}},
               '{"n": {"n": {}}}', '{"n": {"m": {}}}'),
    "a map stays one": ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"x": 1}', '{"x": ""}'),
    "no properties": ({"type": "object"}, '{"x": 1}', "[]"),
    "said to be open": ({**A, "additionalProperties": True}, '{"a": 1, "x": 1}', '{"x": 1}'),
}  # fmt: skip


def asked(dialect: Any, body: dict[str, Any]) -> ResponseFormat:
    model: Any = SimpleNamespace(name="m", can_think=False, max_model_len=512, answer_tokens=99, created=0)
    parsed, ignored = read_body(dialect.body, {"model": "m", **body})
    found = dialect.parse(parsed, model, ignored, Caller()).sampling.response_format
    assert found is not None
    return found


@pytest.mark.parametrize(("schema", "good", "bad"), STRICT.values(), ids=STRICT)
def test_strict_closes_objects_and_leaves_what_is_declared(schema: dict, good: str, bad: str) -> None:
    named = {"name": "x", "schema": schema, "strict": True}
    wanted = {"type": "json_schema", "json_schema": named}
    forms = [
        asked(OpenAIChat(), {"messages": [{"role": "user", "content": "hi"}], "response_format": wanted}),
        asked(OpenAIResponses(), {"input": "hi", "text": {"format": {"type": "json_schema", **named}}}),
    ]
    assert [(admits(form, good), admits(form, bad)) for form in forms] == [(True, False)] * 2
    assert admits(JSONSchema(json_schema=schema), good)


def test_a_schema_of_any_depth_or_size_is_closed_or_refused_in_one_way() -> None:
    deep: Any = {}
    for _ in range(3000):
        deep = {"allOf": [deep]}
    chain = {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}], "properties": {"a": {}}} for n in range(3000)}
    for schema, words in ((deep, "nested deeper"), ({"$defs": chain}, "too many"), ({"$ref": 1, "properties": []}, "")):
        try:
            answer_of(schema, strict=True)
        except (ValueError, WorkbenchError) as error:
            assert words and words in str(error)
