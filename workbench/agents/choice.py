"""Carry out `tool_choice` as a grammar over the whole answer: text, or calls that keep their tools' schemas.

A call begins with the control token of the model's format, never with text that spells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from workbench.agents.call_format import CallFormat
from workbench.errors import WorkbenchError, nearest
from workbench.prompt.tools import Tool
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat
from workbench.sampling.grammar import PLAIN, lark_name, lark_of
from workbench.sampling.json_schema import check_keywords

CHOICES = ("auto", "none", "required")
TEXT = r"/(.|\n)*/"


def check_choice(choice: str, tools: Sequence[Tool]) -> None:
    """Refuse a `tool_choice` that is neither one of `CHOICES` nor a tool's name, or needs a tool (WorkbenchError)."""
    names = [each.name for each in tools]
    if not isinstance(choice, str) or choice not in (*CHOICES, *names):
        hint = nearest(str(choice), [*names, *CHOICES])
        known = ", ".join([*CHOICES, *names])
        raise WorkbenchError(f"tool_choice: {choice!r} is unknown{hint or f'; known: {known}'}")
    if choice == "required" and not tools:
        raise WorkbenchError("tool_choice: 'required' needs a tool, and none is given; give tools")


def answer_grammar(
    tools: Sequence[Tool], choice: str, parallel: bool, format: CallFormat | None, text: ResponseFormat | None = None
) -> ResponseFormat | None:
    """Return the grammar of an answer; None where it is free.

    Args:
        tools: tools that may be called.
        choice: auto, none, required, or a tool's name: then it is called once.
        parallel: several calls in one answer are allowed.
        format: how the model writes calls; without one, no call is possible.
        text: what the answer must be, where it is no call.
    """
    named = [each for each in tools if each.name == choice]
    callable_tools = named or ([] if choice == "none" else list(tools))
    if format is None or not callable_tools:
        return text if text is not None or not tools else Lark(lark=f"start: {TEXT}")
    answer = [] if named or choice == "required" else _answer_rules(text)
    calls = _call_rules(callable_tools, format, parallel and not named)
    if not answer:
        start = "start: agent_calls"
    elif text is None:
        start = "start: agent_text agent_calls?"
    else:
        start = "start: agent_text | agent_calls"
    whitespace = getattr(text, "max_whitespace", None)
    whitespace = 0 if whitespace is None and not format.is_spaced else whitespace
    head = [line for line in answer if line.startswith("%llguidance")] or [PLAIN.strip()]
    rest = [line for line in answer if not line.startswith("%llguidance")]
    return Lark(lark="\n".join([*head, start, *rest, *calls]), max_whitespace=whitespace, spaced_json=format.is_spaced)


def _call_rules(tools: Sequence[Tool], format: CallFormat, several: bool) -> list[str]:
    opening, closing = (lark_name(each) if each else "" for each in (format.opening, format.closing))
    several = several and format.several
    options = " | ".join(f"agent_call_{number}" for number in range(len(tools)))
    if format.is_list:
        more = ' (", " agent_object)*' if several else ""
        rules = [f'agent_calls: {opening} {_text(format.before)} "[" agent_object{more} "]" {closing}']
    else:
        more = f" ({_text(format.between)} agent_call)*" if several else ""
        rules = [
            f"agent_calls: agent_call{more}",
            f"agent_call: {opening} {_text(format.before)} agent_object {_text(format.after)} {closing}",
        ]
    rules.append(f"agent_object: {options}")
    for number, tool in enumerate(tools):
        head = format.head.format(name=json.dumps(tool.name))
        rules += [
            f'agent_call_{number}: {_text(head)} agent_arguments_{number} "}}"',
            f"agent_arguments_{number}: %json {json.dumps(arguments_schema(tool))}",
        ]
    return rules


def _answer_rules(text: ResponseFormat | None) -> list[str]:
    """Return rules for `agent_text`; those of a grammar of the user's keep their names, but its `start`."""
    if text is None:
        return [f"agent_text: {TEXT}"]
    source = text.lark if isinstance(text, Lark) else lark_of(text).removeprefix(PLAIN)
    if isinstance(text, JSONSchema):
        schema = {} if text.json_schema is True else text.json_schema
        return [f"agent_text: %json {json.dumps(schema)}"]
    if isinstance(text, Choices | Regex):
        return [source.replace("start:", "agent_text:", 1)]
    return _renamed(source).splitlines()


def _renamed(lark: str) -> str:
    """Rename the rule `start` of a grammar to `agent_text`, wherever it is no part of a text or pattern."""
    parts = re.split(r'("(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*)', lark)
    return "".join(re.sub(r"\bstart\b", "agent_text", part) if n % 2 == 0 else part for n, part in enumerate(parts))


def _text(words: str) -> str:
    return json.dumps(words, ensure_ascii=False) if words else ""


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments as the grammar carries it out; no argument that it does not name.

    Raises:
        WorkbenchError: for a keyword that is not carried out, with the tool and the path.
    """
    schema = {"additionalProperties": False, **_plain(tool.parameters)}
    try:
        check_keywords(schema)
    except WorkbenchError as error:
        words = str(error).replace("response_format.json_schema", "parameters", 1)
        raise WorkbenchError(f"tool {tool.name!r}: {words}") from None
    return schema


def _plain(value: Any) -> Any:
    """Return a schema in which `nullable` (OpenAPI's) is a choice between a value and null."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {key: _plain(each) for key, each in value.items()}
    if not isinstance(plain.get("nullable"), bool):
        return plain
    if plain.pop("nullable"):
        return {"anyOf": [plain, {"type": "null"}]}
    return plain
