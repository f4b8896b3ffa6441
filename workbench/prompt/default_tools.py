"""Write tools, calls and results as text for chat templates that do not show them (SmolLM2, Gemma).

    system     the system prompt, then each tool as a line of JSON, and an example of its call
    assistant  {"name": "f", "arguments": {"x": 1}}, a line for each call, after the answer's text
    user       f returned: 1, a line for each result, then a request to answer the question

A call is text at the start of an answer and needs no control token. Parts that a template shows are left to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workbench.prompt.traced import TEMPLATE, Origin, Traced, joined, origin_of, traced
from workbench.prompt.traced_json import to_json

NOTE = "the chat template shows no tools: a default text of the workbench's lists them, and a call is JSON"
BEFORE = Traced("You can call these functions:", TEMPLATE)
FORM = Traced("To call a function, reply only with JSON, as here:", TEMPLATE)
AFTER = Traced("Its result is in the next message. Else reply in words.", TEMPLATE)
RETURNED = Traced(" returned: ", TEMPLATE)
ASK = Traced("\nAnswer my question in a sentence.", TEMPLATE)
LINE = Traced("\n", TEMPLATE)
PARAGRAPH = Traced("\n\n", TEMPLATE)
NAME = Traced("name", TEMPLATE)
ARGUMENTS = Traced("arguments", TEMPLATE)
EXAMPLES = {"integer": 0, "number": 0, "boolean": True, "array": [], "object": {}, "null": None}  # otherwise a string
Message = Mapping[str, Any]


class Gaps(NamedTuple):
    """The parts that a chat template does not show: tools, calls in answers, tool results, system messages."""

    tools: bool = False
    calls: bool = False
    results: bool = False
    system: bool = False


def fill(messages: Sequence[Message], tools: Sequence[Message], gaps: Gaps) -> list[Message]:
    """Return messages in which tools, calls and results that the template does not show are plain text.

    Consecutive results and a following user message become one message, because some templates require alternating
    users and answers. If no user message follows, the results end with a request for the answer; without it SmolLM2
    repeats its call.
    """
    filled: list[Message] = []
    waiting: dict[str, str] = {}  # names of calls without a result, by id or position
    has_results = False  # the last message
    for message in messages:
        role, content, calls = message["role"], message.get("content") or "", message.get("tool_calls") or ()
        is_result = role == "tool" and gaps.results
        joins = has_results and (is_result or role == "user")
        if has_results and not joins:
            filled[-1] = _asking(filled[-1])
        if calls:
            waiting = {each.get("id") or str(place): each["function"]["name"] for place, each in enumerate(calls)}
        if calls and gaps.calls:
            words = LINE.join([*([content] if content else []), *(_call(each["function"]) for each in calls)])
            message = {key: each for key, each in message.items() if key != "tool_calls"} | {"content": words}
        elif is_result:
            id = message.get("tool_call_id") or next(iter(waiting), "")
            name = Traced(str.__str__(waiting.pop(id, message.get("name") or "a call")), origin_of([role]))
            message = {"role": "user", "content": joined([name, RETURNED, content])}
        if joins:
            message = {"role": "user", "content": joined([filled.pop()["content"], LINE, message["content"]])}
        filled.append(message)
        has_results = is_result
    if has_results:
        filled[-1] = _asking(filled[-1])
    return _with_tools(filled, tools, gaps) if tools and gaps.tools else filled


def _asking(results: Message) -> Message:
    return {**results, "content": joined([results["content"], ASK])}


def _with_tools(messages: list[Message], tools: Sequence[Message], gaps: Gaps) -> list[Message]:
    """Return messages with the tools after the system prompt, or before the first question."""
    in_question = gaps.system
    role, lines = "user" if in_question else "system", [BEFORE]
    declared = [tool.get("function", tool) for tool in tools]
    lines += [to_json(traced(each, Origin("tool", place))) for place, each in enumerate(declared)]
    if gaps.calls:
        examples = [traced(_example(each), Origin("tool", place)) for place, each in enumerate(declared)]
        lines += [FORM, *map(_call, examples), AFTER]
    listed = LINE.join(lines)
    place = next((place for place, each in enumerate(messages) if each["role"] == role), None)
    if place is None or (place and not in_question):
        return [{"role": role, "content": listed}, *messages]
    content = messages[place].get("content")
    words = PARAGRAPH.join([each for each in ((listed, content) if in_question else (content, listed)) if each])
    return [*messages[:place], {**messages[place], "content": words}, *messages[place + 1 :]]


def _call(function: Message) -> str:
    return to_json({NAME: function["name"], ARGUMENTS: function["arguments"]})


def _example(function: Message) -> Message:
    """Return an example call with the required arguments only: small models copy the example to its end."""
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties"), schema.get("required")
    declared = properties if isinstance(properties, dict) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return {"name": function["name"], "arguments": {name: _value(declared.get(name)) for name in names}}


def _value(schema: Any) -> Any:
    declaration = schema if isinstance(schema, dict) else {}
    values = declaration.get("enum")
    return values[0] if isinstance(values, list) and values else EXAMPLES.get(str(declaration.get("type")), "...")
