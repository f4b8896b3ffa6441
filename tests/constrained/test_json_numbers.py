"""Numbers of a JSON Schema are carried out exactly, or refused with their path: bounds, const and enum."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.prompt.samples import byte_level
from workbench.agents.choice import arguments_schema
from workbench.constrained.grammar import GrammarVocabulary
from workbench.constrained.json_numbers import BOUNDS, CLAMP
from workbench.errors import WorkbenchError
from workbench.prompt.tools import Tool
from workbench.response_format import JSONSchema, Lark, ResponseFormat

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EDGES = [2**31, 2**53, 10**18, 2**60, CLAMP, 2**63, 10**19, 2**64, 10**22, 2**70]
INTEGERS = st.builds(
    lambda edge, away, sign: sign * (edge + away), st.sampled_from(EDGES), st.integers(-2, 2), st.sampled_from([1, -1])
)
NUMBERS = st.one_of(INTEGERS, INTEGERS.map(float), st.integers(-20, 20), st.floats(-1e20, 1e20))
TYPES = st.sampled_from([{}, {"type": "integer"}, {"type": "number"}, {"type": ["integer", "null"]}])


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(byte_level())


def admitted(form: ResponseFormat, texts: list[str]) -> set[str]:
    """Return the texts that are whole answers of a format."""
    symbols, end = vocabulary().compile(form).symbols, vocabulary().end_symbol
    return {text for text in texts if symbols.validate_tokens([*text.encode(), end]) == len(text) + 1}


def is_valid(number: float, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(number)


@given(
    kind=TYPES,
    bounds=st.dictionaries(st.sampled_from(BOUNDS), NUMBERS, min_size=1, max_size=2),
    others=st.lists(INTEGERS, max_size=6),
)
@example({"type": "integer"}, {"minimum": INT64_MIN, "maximum": INT64_MAX}, [INT64_MAX, -CLAMP, INT64_MIN])
@example({"type": "integer"}, {"exclusiveMinimum": 10**18, "maximum": INT64_MAX}, [10**18])
@example({"type": "integer"}, {"minimum": 10**19, "maximum": 2**64}, [INT64_MAX])
@example({"type": "number"}, {"minimum": 0.5, "maximum": CLAMP}, [CLAMP, 9223372036854775000])
@example({}, {"maximum": float(2**53 + 2)}, [2**53 + 2, 2**53 + 3])
def test_what_bounds_admit_is_valid_and_what_is_valid_is_admitted(
    kind: dict, bounds: dict[str, float], others: list[int]
) -> None:
    schema = {**kind, **bounds}
    numbers = {n for each in bounds.values() for n in (int(each) - 1, int(each), int(each) + 1)} | {0, 7, *others}
    try:
        found = admitted(JSONSchema(json_schema=schema), [str(each) for each in numbers])
    except WorkbenchError as error:
        assert str(error).startswith("response_format.json_schema"), error
        valid = [number for number in numbers if is_valid(number, schema)]
        assert not valid or any(abs(each) >= 2**53 for each in bounds.values()), error
        return
    for number in numbers:
        assert str(number) not in found or is_valid(number, schema), (number, schema)
        if is_valid(number, schema) and abs(number) <= CLAMP - 1024:
            assert str(number) in found, (number, schema)


@given(number=NUMBERS)
@example(number=INT64_MIN)
@example(number=-INT64_MAX)
@example(number=1234567890123456789)
@example(number=2**64 - 1)
@example(number=2**60)
def test_a_value_is_admitted_word_for_word_or_refused_with_its_path(number: float) -> None:
    written = int(number) if float(number).is_integer() else number  # 3.0 and 3 are one number
    schemas = {"const": {"const": number}, "enum[1]": {"enum": ["a", number]}, "const.a[0]": {"const": {"a": [number]}}}
    for path, schema in schemas.items():
        value = {"a": [written]} if path == "const.a[0]" else written
        text = json.dumps(value)
        nearby = [str(int(number) + each) for each in (-1, 0, 1)]
        try:
            found = admitted(JSONSchema(json_schema=schema), [text, *nearby])
        except WorkbenchError as error:
            assert f"response_format.json_schema.{path}: " in str(error)
            assert abs(number) >= 2**53 or len(Decimal(repr(number)).as_tuple().digits) > 15 or abs(number) < 1e-22
            continue
        assert text in found or "e" in text
        assert all(json.loads(each) == value for each in found)


ACCEPTED = [
    {"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MAX},
    {"type": "integer", "exclusiveMinimum": INT64_MIN - 1, "exclusiveMaximum": INT64_MAX + 1},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "integer", "minimum": float(INT64_MIN), "maximum": float(INT64_MAX)},
    {"type": ["integer", "null"], "minimum": INT64_MIN},
    {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    {"type": "number", "exclusiveMinimum": 5e-324},
    {"type": "number", "minimum": 2.2250738585072014e-308},
    {"type": "number", "minimum": 0.30000000000000004},
    {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    {"minimum": INT64_MIN, "maximum": INT64_MAX},
    {"anyOf": [{"type": "integer", "minimum": INT64_MIN}, {"type": "null"}]},
]


@pytest.mark.parametrize("schema", ACCEPTED, ids=str)
def test_bounds_of_a_type_refuse_nothing(schema: dict) -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"a": schema}})
    grammar = Lark(lark=f"start: %json {json.dumps(arguments_schema(tool))}")
    for number in (0, 0.25, 7, 2**53 + 1, CLAMP - 1024):
        assert bool(admitted(grammar, [f'{{"a": {number}}}'])) is is_valid(number, schema), number
    most = 2**63 if schema.get("type") == "integer" and "maximum" in schema else 2**70
    assert not admitted(grammar, [f'{{"a":{most}}}']) or is_valid(most, schema)


@pytest.mark.parametrize("key", ["maxLength", "maxItems", "maxProperties"])
@pytest.mark.parametrize("most", [2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1])
def test_lengths_without_a_bound_refuse_nothing(key: str, most: int) -> None:
    answers = {"maxLength": ("string", '"abc"'), "maxItems": ("array", "[1]"), "maxProperties": ("object", "{}")}
    kind, text = answers[key]
    assert admitted(JSONSchema(json_schema={"type": kind, key: most}), [text])


REFUSED = {
    "a reference to an annotation": ({"$ref": "#/default", "default": {"const": INT64_MIN}}, "json_schema: $ref"),
    "a reference into an enum": ({"$ref": "#/enum/0", "enum": [{"const": 1}]}, "json_schema: $ref"),
    "within branches": ({"anyOf": [{"items": {"const": INT64_MIN}}]}, "json_schema.anyOf[0].items.const"),
    "under a definition": ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [INT64_MIN]}}}, "$defs.a.enum[0]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_place_of_a_number_is_looked_at(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(WorkbenchError, match="response_format") as raised:
        vocabulary().compile(JSONSchema(json_schema=schema))
    assert path in str(raised.value)


def test_a_tool_and_a_grammar_name_the_place_too() -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"a": {"enum": [INT64_MIN]}}})
    refuses(r"tool 'f': parameters.properties.a.enum\[0\]", arguments_schema, tool)
    refuses(
        r"response_format.lark: character 13: %json.const",
        lambda: vocabulary().compile(Lark(lark=f'start: %json {{"const": {INT64_MIN}}}')),
    )
    inner = f'{{"grammars": [{{"json_schema": {{"const": {INT64_MIN}}}, "name": "%llguidance"}}]}}'
    refuses("response_format.lark: is JSON", lambda: vocabulary().compile(Lark(lark=inner)))


def test_an_integer_of_any_length_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="default: an integer of over 1024 bits"):
        JSONSchema(json_schema={"default": 10**5000})
