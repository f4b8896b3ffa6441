"""Schemas of tools: every valid instance can be said, what is not carried out is left to a check or refused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.agents.arguments import find_fault
from workbench.agents.call_format import CallFormat
from workbench.agents.choice import answer_grammar, check_schemas
from workbench.constrained.grammar import GrammarVocabulary
from workbench.constrained.json_schema import CARRIED_OUT
from workbench.errors import WorkbenchError
from workbench.prompt.call_texts import read_calls
from workbench.prompt.tools import Tool, declare
from workbench.response_format import JSONSchema

FORMAT = CallFormat("<|tool|>")
Case = tuple[dict[str, Any], Any]  # a schema, and an instance with its properties in the schema's order


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(byte_level())


def says(tool: Tool, arguments: Any, choice: str = "auto") -> str:
    """Return how far the grammar of an answer admits a call with these arguments; empty where it does as a whole."""
    wanted = answer_grammar([tool], choice, True, FORMAT)
    assert wanted is not None
    matcher = vocabulary().compile(wanted).tokens.deep_copy()
    text = f'<|tool|>{{"name": "{tool.name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    ids = byte_level().encode(text, special=True)
    taken = matcher.validate_tokens(ids)
    matcher.consume_tokens(ids[:taken])
    return "" if taken == len(ids) and matcher.is_accepting() else byte_level().decode(ids[:taken], special=True)


VALUES: list[Case] = [
    ({"type": "string"}, "é<x>"), ({"type": "integer", "minimum": 0}, 3), ({"enum": ["a", 2, None]}, 2), ({}, [1, {}]),
    ({"type": "string", "format": "phone"}, "+1"), ({"type": "string", "format": "uri-reference", "example": "a"}, "b"),
    ({"type": "string", "contentEncoding": "base64", "x-order": 1}, "YQ=="),
    ({"type": "string", "nullable": True}, None),
    ({"enum": ["a"], "nullable": True}, None), ({"const": "a", "nullable": True}, None),
    ({"$ref": "#/$defs/n", "nullable": True}, None),
    ({"$ref": "#/$defs/n"}, 7),
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [1, 2]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"ab": 1}), ({"not": {"const": 3}}, 4),
    ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "ab"), ({"type": "array", "contains": {"const": 1}}, [0, 1]),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 1.5}]}, 0.5), ({"pattern": "^(?=a)b?a"}, "a"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2}), ({"type": "string", "$anchor": "a"}, ""),
    ({"oneOf": [{"$ref": "#/$defs/n"}], "discriminator": {"propertyName": "kind"}}, 1), ({"required": True}, "x"),
    ({"pattern": r"\bfoo\b"}, "a foo"), ({"pattern": r"^[\cA]*$"}, ""), ({"pattern": "^[^]+$"}, "a"),
    ({"type": "object", "patternProperties": {"^(?!x)": {"type": "null"}}, "additionalProperties": False}, {"a": None}),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}, "1$": {"minimum": 3}}}, {"x1": 4, "y": ""}),
    ({"type": "object", "minProperties": 1}, {"a": 1}), ({"type": "string", "maxlength": 1}, "ab"),
]  # fmt: skip
DEFINED = {"n": {"type": "integer", "title": "n"}}


@st.composite
def objects(draw: st.DrawFn, names: str = "abcd") -> Case:
    """Draw an object's schema, in branches or without, and an instance of it: some of the properties, and others."""
    listed = {name: draw(st.sampled_from(VALUES)) for name in names[: draw(st.integers(1, len(names)))]}
    instance = {name: value for name, (_, value) in listed.items() if draw(st.booleans())}
    schema: dict[str, Any] = {"properties": {name: each for name, (each, _) in listed.items()}}
    schema |= {"type": "object"} if draw(st.booleans()) else {}
    schema |= {"required": [*instance][: draw(st.integers(0, 2))]} if instance else {}
    way = draw(st.sampled_from(["", "", "closed", "open", "anyOf", "oneOf", "allOf", "$ref"]))
    if way == "closed":
        schema["additionalProperties"] = False
    elif way in ("", "open"):
        instance |= {"other": 1} if draw(st.booleans()) else {}
    elif way == "$ref":
        schema = {"$ref": "#/$defs/whole", "$defs": {"whole": schema}}
    elif way == "allOf":
        schema = {"allOf": [schema, {"properties": {"z": {"type": "boolean"}}, "required": ["z"]}]}
        instance |= {"z": True}
    else:
        other = {"properties": {"z": {"type": "null"}}, "required": ["z"], "additionalProperties": False}
        schema = {way: [other, schema] if draw(st.booleans()) else [schema, other]}
    return schema, instance


@settings(max_examples=tries(60), deadline=None)
@given(objects())
def test_every_valid_instance_can_be_said_and_passes_the_check(case: Case) -> None:
    schema, instance = case
    schema = {**schema, "$defs": {**DEFINED, **schema.get("$defs", {})}}
    tool = declare({"name": "f", "parameters": schema})
    assert says(tool, instance) == ""
    assert "other" in instance or find_fault(instance, schema) == ""


LEFT = {  # a keyword that is not carried out: a value that it forbids, and the words of the check
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [1, 2, 1.0], "x[2]: 1.0 occurs twice"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, {"ab": 1}, "the name of x.ab"),
    "not": ({"not": {"type": "string"}}, "a", "x: matches {"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 2}}, "a", "x: must have 2"),
    "else": ({"if": {"type": "string"}, "else": {"minimum": 2}}, 1, "x: 1 violates minimum"),
    "contains": ({"contains": {"const": 1}}, [2], "x: 0 items match contains"),
    "maxContains": ({"contains": {"const": 1}, "maxContains": 1}, [1, 1], "x: 2 items match contains"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "'b' is missing, which 'a' needs"),
    "dependentSchemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}, "'b' is missing"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"minimum": 0}]}, 1, "x: matches 2 alternatives of oneOf"),
    "minProperties": ({"minProperties": 1}, {}, "x: must have 1 to"),
    "dependencies": ({"dependencies": {"a": ["b"]}}, {"a": 1}, "'b' is missing"),
}


@pytest.mark.parametrize("keyword", LEFT)
def test_what_is_not_carried_out_is_left_to_the_check_or_refused(keyword: str) -> None:
    below, value, words = LEFT[keyword]
    schema = {"type": "object", "properties": {"x": below}}
    tool = declare({"name": "f", "parameters": schema})
    assert words in find_fault({"x": value}, schema)
    assert says(tool, {"x": value}) == ""
    assert check_schemas("none", [tool]) == []
    if keyword == "oneOf":  # the compiler sees some of them apart
        return
    for refused, choice in ((tool.model_copy(update={"strict": True}), "auto"), (tool, "required"), (tool, "f")):
        with pytest.raises(WorkbenchError, match=r"^tool 'f': parameters\.properties\.x.* is not supported"):
            check_schemas(choice, [refused])
    assert all(each.startswith("tool 'f': parameters.properties.x") for each in check_schemas("auto", [tool]))


HARD: dict[str, tuple[Any, list[Any], list[Any]]] = {  # schemas, instances that are theirs, and some that are not
    "a reference to itself beside a type": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {
            "b": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}], "type": ["object", "null"]}}}}},
        [{"b": {"b": None}}, {}], [{"b": {"b": 1}}]),
    "a reference to itself in a branch beside a property": (
        {"properties": {"b": {"type": "object"}}, "anyOf": [{"properties": {"b": {"$ref": "#"}}}, {"required": ["c"]}]},
        [{"b": {"b": {}}}], [{"b": 1}]),
    "none at all": ({"properties": {"a": False}, "required": ["a"]}, [], [{"a": 1}]),
    "a count of properties": ({"properties": {"a": {}}, "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    "an anchor": ({"properties": {"a": {"$ref": "#x"}, "b": {"$anchor": "x", "type": "string"}}}, [{"a": "c"}], []),
    "branches that differ in a format alone": (
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"format": "uri", "type": "string"}]}}}, [{"a": "b"}], []),
    "a pattern that is not to be": ({"properties": {"a": {"not": {"pattern": "^x"}}}}, [{"a": "b"}], []),
    "a pattern as a condition": (
        {"properties": {"a": {"if": {"pattern": "^x"}, "then": {"maxLength": 1}}}}, [{"a": "long"}], []),
    "a pattern that some may have": (
        {"properties": {"a": {"contains": {"pattern": "^x"}, "maxContains": 1}}}, [{"a": ["x", "b"]}], []),
    "a reference to a pattern": (
        {"properties": {"a": {"not": {"$ref": "#/$defs/x"}}}, "$defs": {"x": {"pattern": "^x"}}}, [{"a": "b"}], []),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_a_schema_that_cannot_be_compiled_or_checked_as_a_whole_refuses_no_call(name: str) -> None:
    schema, good, bad = HARD[name]
    tool, other = declare({"name": "f", "parameters": schema}), declare({"name": "g"})
    for value in good:
        assert says(tool, value) == "" == find_fault(value, schema), value
    for value in bad:
        assert find_fault(value, schema)
    wanted = answer_grammar([tool, other], "auto", True, FORMAT)
    assert wanted is not None and vocabulary().compile(wanted)
    strict = answer_grammar([tool.model_copy(update={"strict": True}), other], "auto", True, FORMAT) if bad else None
    if strict is not None:
        with pytest.raises(WorkbenchError, match=r"^tool 'f': parameters"):
            vocabulary().compile(strict)


JUNK = (None, 5, -1, 0.5, "any", "a(?=b)(", [], [5], [None], {}, {"a": 5}, {"a": None}, True, ["any", "string"])


@pytest.mark.parametrize("keyword", sorted(CARRIED_OUT))
def test_a_keyword_with_a_value_that_is_none_of_its_is_left_to_the_check(keyword: str) -> None:
    """One such refused every call with its tool."""
    schema: dict[str, Any] = {"type": "object", "properties": {
        name: each for n, junk in enumerate(JUNK)
        for name, each in ((f"x{n}", {keyword: junk}), (f"y{n}", {"items": {"anyOf": [{keyword: junk}, {}]}}))
    }}  # fmt: skip
    tool = declare({"name": "f", "parameters": schema})
    assert says(tool, {}) == "" == says(tool, {"y0": [1], "y5": ["a"]})
    assert all(each.startswith("tool 'f': parameters.properties.") for each in check_schemas("auto", [tool]))
    for value in (None, "a", 1, [1], {"a": 1}):
        assert isinstance(find_fault(dict.fromkeys(schema["properties"], value), schema), str)
        text = "".join(f"<parameter={name}>\n{json.dumps(value)}\n</parameter>\n" for name in schema["properties"])
        assert [call.name for call in read_calls(f"<function=f>\n{text}</function>", [tool])] == ["f"]
    assert find_fault({"x": 1}, {"properties": {"x": {"type": ["any", "string"]}}}) == ""


WORDS = (
    "example examples x-order discriminator contentEncoding contentMediaType contentSchema $anchor $dynamicAnchor xml "
    "id externalDocs markdownDescription x-guidance readOnly enumNames propertyOrdering $vocabulary"
)
ANNOTATED = {**dict.fromkeys(WORDS.split(), {"not": {}}), "format": "byte", "uniqueItems": False, "propertyNames": {}}


def test_annotations_constrain_nothing_in_tools_and_formats_alike() -> None:
    for nullable, value in (({}, "a"), ({"nullable": True}, None), ({"nullable": False}, "a")):
        schema = {"type": "object", "properties": {"x": {"type": "string", **ANNOTATED, **nullable}}, **ANNOTATED}
        tool = declare({"name": "f", "parameters": schema, "strict": True})
        assert says(tool, {"x": value}, "required") == ""
        matcher = vocabulary().compile(JSONSchema(json_schema=schema)).tokens.deep_copy()
        ids = byte_level().encode(json.dumps({"x": value}))
        assert matcher.validate_tokens(ids) == len(ids)


FAULTS = {
    "parameters.properties.x: the keyword 'pattern' is not supported as '(a': unclosed group": {
        "properties": {"x": {"pattern": "(a"}}
    },
    "parameters.properties.x: the keyword 'pattern' is not supported as 'a(?!b)': look-around": {
        "properties": {"x": {"type": "string", "pattern": "a(?!b)"}}
    },
    "parameters.properties.x: the keyword 'patternProperties' is not supported as '^(?!a)': look-around": {
        "properties": {"x": {"patternProperties": {"^(?!a)": {}}}}
    },
    "parameters.properties.x.items: the keyword 'oneOf' is not supported where": {
        "properties": {"x": {"items": {"oneOf": [{"type": "integer"}, {"minimum": 0}]}}}
    },
    "parameters.anyOf[0].properties.x: Invalid type": {"anyOf": [{"properties": {"x": {"type": "strng"}}}]},
    "parameters: no end was found": {"properties": {"x": {"$ref": "#"}}, "required": ["x"]},
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_that_the_compiler_finds_has_the_name_of_the_tool(words: str) -> None:
    good, bad = declare({"name": "good"}), declare({"name": "bad", "parameters": FAULTS[words]})
    wanted = answer_grammar([bad] if "end" in words else [good, bad], "required", True, FORMAT)
    assert wanted is not None
    with pytest.raises(WorkbenchError) as caught:
        vocabulary().compile(wanted)
    said = str(caught.value)
    assert said.startswith(f"tool 'bad': {words}") and "lark" not in said and "agent_" not in said and "\n" not in said


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}, {"input_schema": {}}])
@pytest.mark.parametrize("shape", ["within", "flat"])
def test_a_function_without_parameters_has_no_arguments(given: dict[str, Any], shape: str) -> None:
    flat = {"name": "f", "description": "d", **given}
    tool = declare({"type": "function", "function": flat} if shape == "within" else flat)
    assert tool.declaration()["function"]["parameters"]["properties"] == {}
    assert says(tool, {}, "required") == "" != says(tool, {"a": 1}, "required")
    assert declare(tool.model_dump()) == tool


def test_a_check_ends_whatever_the_schema() -> None:
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {"d30": False}
    assert find_fault({}, {"$ref": "#/$defs/d0", "$defs": doubling})
    assert find_fault({"a": {}}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}) == ""
