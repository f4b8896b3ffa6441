"""Write tools, their calls and results for a chat template that shows none (SmolLM2's, Gemma's).

    system     the system prompt, then each tool as a line of JSON, and how one is called
    assistant  {"name": "f", "arguments": {"x": 1}}, a line for each call, behind the answer's text
    user       Result of f: 1

A call is text with which an answer begins, and needs no control token. What a template shows by itself is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workbench.prompt.traced import TEMPLATE, Origin, Traced, joined, origin_of, traced
from workbench.prompt.traced_json import to_json

NOTE = "the chat template shows no tools: a default text of the workbench's lists them, and a call is JSON"
BEFORE = Traced("You can call these functions:", TEMPLATE)
FORM = Traced(
    'To call a function, reply only with JSON: {"name": <name of the function>, "arguments": {<arguments>}}. Its '
    "result is in the next message. Else reply in words.",
    TEMPLATE,
)
RESULT, COLON, LINE, PARAGRAPH, NAME, ARGUMENTS = (
    Traced(words, TEMPLATE) for words in ("Result of ", ": ", "\n", "\n\n", "name", "arguments")
)
Message = Mapping[str, Any]


class Gaps(NamedTuple):
    """The things that a chat template does not show: tools, calls in answers, results of tools; a system message."""

    tools: bool = False
    calls: bool = False
    results: bool = False
    system: bool = False


def fill(messages: Sequence[Message], tools: Sequence[Message], gaps: Gaps) -> list[Message]:
    """Return messages in which what the template does not show of tools, calls and results is text.

    Results that follow one another, and a user's message behind them, become one message: some templates want users
    and answers in turns.
    """
    found: list[Message] = []
    waiting: dict[str, str] = {}  # names of calls without a result, by id or place
    has_results = False  # the last message
    for message in messages:
        role, content, calls = message["role"], message.get("content") or "", message.get("tool_calls") or ()
        is_result = role == "tool" and gaps.results
        if calls:
            waiting = {each.get("id") or str(place): each["function"]["name"] for place, each in enumerate(calls)}
        if calls and gaps.calls:
            words = LINE.join([*([content] if content else []), *map(_call, calls)])
            message = {key: each for key, each in message.items() if key != "tool_calls"} | {"content": words}
        elif is_result:
            id = message.get("tool_call_id") or next(iter(waiting), "")
            name = Traced(str.__str__(waiting.pop(id, message.get("name") or "a call")), origin_of([role]))
            message = {"role": "user", "content": joined([RESULT, name, COLON, content])}
        if has_results and (is_result or role == "user"):
            message = {"role": "user", "content": joined([found.pop()["content"], LINE, message["content"]])}
        found.append(message)
        has_results = is_result
    return _with_tools(found, tools, gaps) if tools and gaps.tools else found


def _with_tools(messages: list[Message], tools: Sequence[Message], gaps: Gaps) -> list[Message]:
    """Return messages with the tools behind the system prompt, or before the first question."""
    in_question = gaps.system
    role = "user" if in_question else "system"
    lines = [to_json(traced(tool.get("function", tool), Origin("tool", place))) for place, tool in enumerate(tools)]
    listed = LINE.join([BEFORE, *lines, *([FORM] if gaps.calls else [])])
    place = next((place for place, each in enumerate(messages) if each["role"] == role), None)
    if place is None or (place and not in_question):
        return [{"role": role, "content": listed}, *messages]
    content = messages[place].get("content")
    words = PARAGRAPH.join([each for each in ((listed, content) if in_question else (content, listed)) if each])
    return [*messages[:place], {**messages[place], "content": words}, *messages[place + 1 :]]


def _call(call: Message) -> str:
    function = call["function"]
    return to_json({NAME: function["name"], ARGUMENTS: function["arguments"]})
