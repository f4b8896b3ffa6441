"""Parse tool calls that are not one JSON value: calls in tags, or a name followed by arguments.

    <function=f>\n<parameter=x>\n1\n</parameter>\n</function>                  Qwen3-Coder
    <invoke name="f">\n<parameter name="x">1</parameter></invoke>              MiniMax M2
    f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>                          GLM 4.5 and later
    f{"x": 1}                                                                  Mistral from its eleventh tokenizer on
    functionf\n```json\n{"x": 1}\n```                                          DeepSeek up to R1, between control tokens
    functions.f:0{"x": 1}                                                      Kimi K2

A value in tags is a plain string or JSON, according to the type in the tool's schema. If a model forgets
`</parameter>`, the next argument or the call's end ends the value, as in vLLM's parser.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.prompt.tools import MAX_SCHEMA_DEPTH, NAME, Tool, follow
from workbench.prompt.turns import UNPARSED, ToolCall

_CALLS = (  # name and body of a call; then name and value of its arguments
    (re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*(?=<function=|\Z)", re.DOTALL),
     re.compile(r"\s*<parameter=([^>\n]+)>\n?(?:((?:(?!</parameter>).)*?)\s*(?=<parameter=|\Z)"
                r"|(.*?)\n?</parameter>\s*(?=<parameter=|\Z))", re.DOTALL)),
    (re.compile(r'\s*<invoke name="([^"\n]+)">(.*?)</invoke>\s*(?=<invoke |\Z)', re.DOTALL),
     re.compile(r'\s*<parameter name="([^"\n]+)">(.*?)</parameter>\s*(?=<parameter |\Z)', re.DOTALL)),
    (re.compile(r"\s*([^\s<>{}]+)\s*(<arg_key>.*</arg_value>)\s*\Z", re.DOTALL),
     re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)),
)  # fmt: skip
_BEGUN = re.compile(r'\s*(?:<function=([^>\n]+)>|<invoke name="([^"\n]+)">|([^\s<>{}]+)\s*(?=<arg_key>))')
_NAMED = re.compile(rf"\s*({NAME.pattern})(?::\d+)?\s*(?P<fence>```json\s*)?(?=\{{)")
_FENCE = re.compile(r"\s*```")
MAX_FLAT = 64  # maximum number of flat forms of one schema
_SPELT = {"True": "true", "False": "false", "None": "null"}  # constants as Python, and so templates, write them
_KIND = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def read_calls(text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """Return the calls in a text; an empty list if the text has another form. A truncated call keeps its text unparsed.
    """
    for call, argument in _CALLS:
        if calls := list(_matches(call, text)):
            return [_call(name, body, argument, tools) for name, body in calls]
    if begun := _BEGUN.match(text):
        return [ToolCall(name=begun[begun.lastindex or 0], arguments={UNPARSED: text[begun.end() :]})]
    if text.strip() in {tool.name for tool in tools}:
        return [ToolCall(name=text.strip())]
    return list(_named_json(text, tools))


def kinds_of(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that a schema and its branches allow; empty if it names none."""
    types, is_nullable = set[str](), False
    seen, waiting = set[int](), [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        declared, listed = each.get("type"), each.get("enum")
        kinds = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
        values = [*(listed if isinstance(listed, list) else ()), *([each["const"]] if "const" in each else [])]
        types |= kinds or {_kind(value) for value in values}
        is_nullable |= each.get("nullable") is True
        waiting += _branches(each, root)
    return types | ({"null"} if types and is_nullable else set())


def flat_schemas(
    schema: Any, root: Any, depth: int = 0, resolved: dict[int, list[dict[str, Any]]] | None = None
) -> list[dict[str, Any]]:
    """Return object schemas without branches that together allow the same values as an object schema. Each has
    `properties`, the names in `required`, and `additionalProperties` false if no others are allowed. `resolved` has the
    results for schemas flattened before.
    """
    resolved = {} if resolved is None else resolved
    if id(schema) in resolved:
        return resolved[id(schema)]
    resolved[id(schema)] = [{"properties": {}, "required": set()}]  # a recursive schema
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_DEPTH:
        return resolved[id(schema)]
    required = schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    listed = schema.get("properties")
    object_schema = {"properties": listed if isinstance(listed, dict) else {}, "required": names}
    alternatives = [object_schema | ({"additionalProperties": False} if is_closed else {})]
    groups = [[each] for each in _branches({**schema, "anyOf": [], "oneOf": []}, root)]
    for branches in (*groups, schema.get("anyOf"), schema.get("oneOf")):
        listed = branches if isinstance(branches, list) else ()
        inner = [flat for each in listed for flat in flat_schemas(each, root, depth + 1, resolved)]
        if inner and len(alternatives) * len(inner) <= MAX_FLAT:
            alternatives = [_joined(one, other) for one in alternatives for other in inner]
    resolved[id(schema)] = alternatives
    return alternatives


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    properties = {**one["properties"], **other["properties"]}
    return {**one, **other, "properties": properties, "required": one["required"] | other["required"]}


def _branches(schema: dict[str, Any], root: Any) -> Iterator[Any]:
    for key in ("anyOf", "oneOf", "allOf"):
        yield from value if isinstance(value := schema.get(key), list) else ()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield follow(root, reference)[0]


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, str]]:
    """Yield the groups of adjacent matches that cover a text to its end; nothing if they leave a gap."""
    matches, place = [], 0
    while match := pattern.match(text, place):
        matches.append((match[1], match[match.lastindex or 0]))
        place = match.end()
    if place == len(text):
        yield from matches


def _call(name: str, body: str, argument: re.Pattern[str], tools: Sequence[Tool]) -> ToolCall:
    pairs = list(_matches(argument, body.rstrip()))
    if not pairs and body.strip():
        return ToolCall(name=name, arguments={UNPARSED: body})
    root = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = [flat["properties"] for flat in flat_schemas(root, root)]
    kinds = {key: {kind for each in properties for kind in kinds_of(each.get(key), root)} for key, _ in pairs}
    arguments = {key: _value(text, kinds[key]) for key, text in pairs}
    return ToolCall.parse(name, arguments)


def _value(text: str, kinds: set[str]) -> Any:
    """Parse the text in a tag as a value of one of these JSON types; of any type if none is given."""
    if kinds == {"string"}:
        return text
    try:
        value: Any = json.loads(_SPELT.get(text.strip(), text), parse_constant=lambda _: text)
    except (ValueError, RecursionError):
        value = _python_value(text) if kinds & {"object", "array"} else text
    kind = _kind(value)
    is_one = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    whole = kind == "number" and "integer" in kinds and value.is_integer()
    return int(value) if whole and not is_one else value if is_one else text


def _python_value(text: str) -> Any:
    """Parse a list or dict in Python syntax, which some templates write; return other text unchanged."""
    try:
        value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value, allow_nan=False)) if isinstance(value, list | dict) else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _names(words: str) -> Iterator[str]:
    """Yield the possible tool names in the words before the arguments: a name may be followed by an id, or preceded by
    the kind of tool.
    """
    yield words
    yield words[:-9]
    yield words.removeprefix("functions.")
    yield words.removeprefix("function")


def _kind(value: Any) -> str:
    return _KIND.get(type(value), "null")


def _named_json(text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
    """Yield the calls of a text that consists of names, each followed by a JSON object of arguments."""
    place, tool_names = 0, {tool.name for tool in tools}
    calls: list[ToolCall] = []
    while match := _NAMED.match(text, place):
        name = next((each for each in _names(match[1]) if each in tool_names), match[1])
        try:
            place = json.JSONDecoder().raw_decode(text, match.end())[1]
        except (ValueError, RecursionError):
            place = len(text)
            if name not in tool_names:
                return
        calls.append(ToolCall.parse(name, text[match.end() : place]))
        place += len(fence[0]) if match["fence"] and (fence := _FENCE.match(text, place)) else 0
    if not text[place:].strip():
        yield from calls
