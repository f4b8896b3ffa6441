"""Every bad `response_format` is one error after bounded work, and the requests beside it say what they would have."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.calls import calls_of, refusal_of
from tests.engine.formats import RUNNERS, ask, result
from tests.helpers.events import of
from workbench.engine.runner import Runner, generate
from workbench.response_format import ResponseFormat
from workbench.trace.events import Finished

MAX_CALLS = 250_000  # of a thread: 8 for each part of the largest format here, 60 for each node of a search
FORM = TypeAdapter(ResponseFormat)


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def schema_form(schema: object, **more: object) -> dict[str, Any]:
    return {"kind": "json_schema", "json_schema": schema, **more}


def lark(text: str) -> dict[str, Any]:
    return {"kind": "lark", "lark": text}


def regex(text: str) -> dict[str, Any]:
    return {"kind": "regex", "regex": text}


DEEP_TEXT = '{"items":' * 10_000 + "{}" + "}" * 10_000
LONG = {"enum": [f"{number:0100}" for number in range(100_000)]}  # 10 MB
ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
BAD: dict[str, tuple[object, str]] = {
    "nested 10,000 deep": (schema_form(nested(10_000)), "nested deeper than 100 levels: items.items"),
    "nested 10,000 deep, as text": (schema_form(DEEP_TEXT), "should be a valid dictionary"),
    "nested 10,000 deep, in Lark": (lark(f"start: %json {DEEP_TEXT}"), "%json"),
    "rules 10,000 deep": (lark(f"start: {'(' * 10_000}'a'{')' * 10_000}"), "response_format.lark"),
    "10 MB": (schema_form(LONG), "longer than 1048576 characters"),
    "10 MB of text": (schema_form(json.dumps(LONG)), "longer than 1048576 characters"),
    "10 MB in one word": (schema_form({"description": "x" * 10**7}), "longer than 1048576 characters"),
    "10 MB of Lark": (lark("x" * 10**7), "at most 1048576 characters"),
    "a long regex": (regex("x" * 10**6), "at most 65536 characters"),
    "20,000 properties": (schema_form({"properties": {f"p{i}": {} for i in range(20_000)}}), "20000 entries"),
    "look-ahead": (regex("(?=a)b"), "look-around"),
    "look-behind": (regex("(?<!a)b"), "look-around"),
    "a reference back": (regex(r"(a)\1"), "backreferences"),
    "a billion characters": (regex("a{1000000000}"), "no end was found"),
    "left recursion": (lark('start: start "a"'), "a rule may need itself"),
    "rules that need one another": (lark("start: a\na: b\nb: a"), "a rule may need itself"),
    "a missing rule": (lark("start: x"), 'unknown name: "x"'),
    "no start": (lark('a: "b"'), "no start rule"),
    "an unknown control token": (lark("start: <|nothing|>"), 'unknown special token: "<|nothing|>"'),
    "a file": (schema_form({"$ref": "file:schema.json"}), "only references within this schema"),
    "a URL": (schema_form({"$ref": "https://example.org/a"}), "only references within this schema"),
    "a reference to itself": (schema_form({"$ref": "#"}), "response_format.json_schema"),
    "required without end": (schema_form(ITSELF), "no end was found"),
    "empty enum": (schema_form({"enum": []}), "Unsatisfiable"),
    "no choices": ({"kind": "choices", "choices": []}, "give 1 to 20000 choices, not 0"),
    "several kinds": (schema_form({}, regex="a"), "response_format.regex: unknown key"),
    "no kind": ({"json_schema": {}, "regex": "a"}, "response_format.kind: is missing"),
    "an unknown kind": ({"kind": "xml"}, "'xml' is unknown"),
    "a word": ("json", "response_format"),
    "half a character": (schema_form({"enum": ["a", "\ud83d"]}), "enum[1]: the lone surrogate U+D83D is no character"),
    "half a character in a name": (schema_form({"properties": {"\ud83d": {}}}), "properties: the lone surrogate"),
    "half a character in a choice": ({"kind": "choices", "choices": ["a", "\ud83d"]}, "the lone surrogate U+D83D"),
    "an integer that is no float64": (schema_form({"enum": [-(2**63)]}), "enum[0]: -9223372036854775808 is not"),
    "a misspelt keyword": (schema_form({"properties": {"a": {"maxlength": 1}}}), "'maxlength' is unknown; did"),
    "uniqueItems": (schema_form({"anyOf": [{"uniqueItems": True}]}), "anyOf[0]: the keyword 'uniqueItems'"),
    "not": (schema_form({"not": {}}), "the keyword 'not' is not supported"),
    "a missing reference": (schema_form({"items": {"$ref": "#/$defs/B"}}), "items: $ref '#/$defs/B'"),
    "a definition of itself": (schema_form({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}), "no answer"),
    "a look-ahead in a schema": (schema_form({"items": {"pattern": "(?=a)b"}}), "items: the keyword 'pattern' is"),
    "an unknown type": (schema_form({"allOf": [{"type": "strng"}]}), "allOf[0]: Invalid type: strng"),
    "bounds": (schema_form({"type": "integer", "minimum": 3, "maximum": 1}), "Unsat"),
    "minProperties": (schema_form({"type": "object", "minProperties": 2}), "minProperties"),
    "false": (schema_form(False), "no answer can meet the schema false"),
    "no room": (schema_form({"type": "string", "minLength": 200}), "its shortest answer has"),
    "an open group": (regex("(a"), "unclosed group"),
    "nothing": (regex("()"), "empty text"),
    "a limit of Lark's": (lark("start: a\na[max_tokens=3]: /x+/"), "'max_tokens' is not supported"),
    "token ids": (lark('start: <[5]> "a"'), "token ids"),
    "a keyword in Lark": (lark('start: %json {"type": "array", "uniqueItems": true}'), "the keyword 'uniqueItems'"),
    "not a number": (schema_form({"const": float("nan")}), "nan is no JSON number"),
}
EXPLODING = (
    "(a{1,1000}){1,1000}",
    "((a{0,999}){0,999}){0,999}b",
    "[ab]*a[ab]{12}",
    "((((a{1,50}){1,50}){1,50}){1,50})+",
)


@cache
def beside() -> dict[str, tuple]:
    return result(generate(RUNNERS((1,)), [ask("good", "tree", 40)]))


def check_beside(act: Callable[[Runner, deque], None]) -> None:
    """Act beside a request under way, which says what it would have said."""
    ours, box = RUNNERS((1,)), deque()
    wanted = beside()  # the vocabulary is ready too
    ours.cancel("good")  # of a test that failed
    ours.submit(ask("good", "tree", 40), box)
    act(ours, box)
    while ours.has_unfinished_requests:
        ours.step(box)
    assert result({event.request_id: event for event in of(Finished, box)}) == wanted


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_format_is_one_error_and_others_go_on(name: str) -> None:
    form, words = BAD[name]

    def refuse(ours: Runner, box: deque) -> None:
        for _ in range(3):
            ours.step(box)
        said, calls = refusal_of(lambda: list(ours.stream("a b", max_tokens=20, response_format=form)))
        assert words in said and len(said) < 1000 and "\n" not in said
        assert calls < MAX_CALLS

    check_beside(refuse)


@pytest.mark.parametrize("pattern", EXPLODING)
@pytest.mark.parametrize("kind", ["regex", "pattern"])
def test_a_regex_that_explodes_is_carried_out_or_refused(kind: str, pattern: str) -> None:
    form = regex(pattern) if kind == "regex" else schema_form({"type": "string", "pattern": f"^({pattern})$"})
    bad: deque = deque()

    def serve_both(ours: Runner, box: deque) -> None:
        ours.submit(ask("bad", FORM.validate_python(form), 30), bad)
        calls = []
        while ours.has_unfinished_requests:
            calls.append(calls_of(lambda: ours.step(box)))
        assert sum(calls) < 2500 * len(calls)

    check_beside(serve_both)
    (end,) = of(Finished, bad)
    assert end.reason in ("stop", "length", "refused", "error"), end
    assert end.error or len(end.token_ids) <= 30
