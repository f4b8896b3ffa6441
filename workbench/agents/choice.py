"""Enforce `tool_choice` by a grammar over the whole answer: text, or calls that satisfy their tools' schemas.

A call begins with the control token of the model's format, never with text that spells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from workbench.agents.arguments import is_flat
from workbench.agents.call_format import PROBE_IDS, PROBE_TOOL, CallFormat, TaggedArguments
from workbench.constrained.grammar import PLAIN, lark_name, lark_of
from workbench.constrained.json_schema import WHERE, check_keywords, widen, within
from workbench.errors import WorkbenchError, nearest
from workbench.prompt.call_texts import flat_schemas, kinds_of
from workbench.prompt.tools import Tool
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat

CHOICES = ("auto", "none", "required")
TEXT = r"/(.|\n)*/"
PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}  # values in templates that write them as texts


def check_choice(choice: str, tools: Sequence[Tool]) -> None:
    """Raise WorkbenchError unless `choice` is a valid `tool_choice`: one of `CHOICES` or a tool's name; `required`
    needs a tool.
    """
    names = [each.name for each in tools]
    if not isinstance(choice, str) or choice not in (*CHOICES, *names):
        hint = nearest(str(choice), [*names, *CHOICES])
        known = ", ".join([*CHOICES, *names])
        raise WorkbenchError(f"tool_choice: {choice!r} is unknown{hint or f'; known: {known}'}")
    if choice == "required" and not tools:
        raise WorkbenchError("tool_choice: 'required' needs a tool, and none is given; give tools")


def tools_of_choice(choice: str, tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools that a `tool_choice` lets the model call."""
    return [each for each in tools if choice in ("auto", "required", each.name)]


def check_schemas(choice: str, tools: Sequence[Tool]) -> list[str]:
    """Return the parts of the callable tools' schemas that the grammar does not enforce, only the check of arguments.
    Raise WorkbenchError for parts that the grammar must enforce and cannot.
    """
    return [each for tool in tools_of_choice(choice, tools) for each in _carried_out(tool, choice != "auto")[1]]


def answer_grammar(
    tools: Sequence[Tool], choice: str, parallel: bool, format: CallFormat | None, text: ResponseFormat | None = None
) -> ResponseFormat | None:
    """Return the grammar of an answer; None for an unconstrained answer.

    Args:
        tools: tools that may be called.
        choice: auto, none, required, or the name of a tool, which is then called once.
        parallel: several calls in one answer are allowed.
        format: the model's format of calls; if None, the grammar has no calls.
        text: the format of an answer that is no call.
    """
    named, callable_tools = choice not in CHOICES, tools_of_choice(choice, tools)
    is_known = format is not None and format.is_shown and bool(format.opening)  # else answers may begin with JSON
    is_free = choice == "auto" and not is_known
    if text is None and is_free:
        return None
    marks = [lark_name(each) for each in (format.thought if format is not None else ())]
    thought = f"({marks[0]} {TEXT} {marks[1]})?" if marks else ""  # thinking is the model's choice
    if format is None or not callable_tools:
        return text if text is not None or not tools else Lark(lark=f"start: {thought} {TEXT}")
    answer = [] if named or choice == "required" else _answer_rules(text)
    schemas = [arguments_schema(tool, choice != "auto") for tool in callable_tools]
    calls = _call_rules(callable_tools, schemas, format, parallel and not named)
    if not answer:
        start = "start: agent_calls"
    elif text is None:
        start = f"start: {thought} agent_text agent_calls?"
    else:
        start = "start: agent_text | agent_calls"
    whitespace = getattr(text, "max_whitespace", None)
    whitespace = 0 if whitespace is None and not format.is_spaced else whitespace
    head = [line for line in answer if line.startswith("%llguidance")] or [PLAIN.strip()]
    rest = [line for line in answer if not line.startswith("%llguidance")]
    source = "\n".join([*head, start, *rest, *calls])
    rules = re.findall(r"^(agent_arguments_(\d+)\w*): %json", source, re.MULTILINE)
    labels = {rule: f"tool {callable_tools[int(n)].name!r}: parameters" for rule, n in rules}
    loose = () if choice != "auto" else tuple(
        label for (_, n), label in zip(rules, labels.values(), strict=True) if not callable_tools[int(n)].strict
    )  # fmt: skip
    labels |= {"agent_text": WHERE} if isinstance(text, JSONSchema) else {}
    return Lark(lark=source, max_whitespace=whitespace, spaced_json=format.is_spaced, labels=labels, loose=loose)


def _call_rules(
    tools: Sequence[Tool], schemas: Sequence[dict[str, Any]], format: CallFormat, several: bool
) -> list[str]:
    opening, closing = (lark_name(each) if each else "" for each in (format.opening, format.closing))
    several = several and format.several
    options = " | ".join(f"agent_call_{number}" for number in range(len(tools)))

    def written(words: str) -> str:
        return _written(words, format.controls)

    if format.is_list:
        more = ' (", " agent_object)*' if several else ""
        rules = [f'agent_calls: {opening} {written(format.before)} "[" agent_object{more} "]" {closing}']
    elif format.is_group:
        more = f" ({written(format.between)} agent_object)*" if several else ""
        rules = [
            f"agent_calls: {opening} {written(format.before)} agent_object{more} {written(format.after)} {closing}"
        ]
    else:
        more = f" ({written(format.between)} agent_call)*" if several else ""
        rules = [
            f"agent_calls: agent_call{more}",
            f"agent_call: {opening} {written(format.before)} agent_object {written(format.after)} {closing}",
        ]
    rules.append(f"agent_object: {options}")
    if any(id in format.head + format.before + format.between for id in PROBE_IDS):
        rules += [f"agent_id:{' AGENT_ID_SIGN' * len(PROBE_IDS[0])}", "AGENT_ID_SIGN: /[A-Za-z0-9]/"]
    if format.tags is not None:
        end = re.escape(format.tags.after).replace("/", r"\/").replace("\n", "n")
        rules += [f"AGENT_VALUE: /(?s:.*){end}/ & ~/(?s:.*){end}(?s:.+)/", r'AGENT_NAME: /[^<>="\n]+/']
    for number, tool in enumerate(tools):
        head, arguments = written(format.head.replace(PROBE_TOOL, tool.name)), f"agent_arguments_{number}"
        rules.append(f"agent_call_{number}: {head} {arguments} {written(format.tail)}")
        if format.tags is None:
            rules.append(f"{arguments}: %json {json.dumps(schemas[number])}")
        else:
            rules += _tagged_rules(arguments, schemas[number], format.tags)
    return rules


def _tagged_rules(rule: str, schema: dict[str, Any], tags: TaggedArguments) -> list[str]:
    """Return the rules of arguments written one by one: texts unquoted, other values as JSON, each with its end tag. A
    text cannot contain the end tag."""
    rules, choices = list[str](), list[str]()
    begin, between, end = (_written(words) for words in (tags.before, tags.between, tags.after))
    for place, flat in enumerate(flat_schemas(schema, schema)):
        arguments = []
        for number, (name, each) in enumerate(flat["properties"].items()):
            value, kinds = f"{rule}_{place}_{number}", kinds_of(each, schema)
            words = each.get("enum", [each["const"]] if "const" in each else None) if kinds == {"string"} else None
            if words:
                rules.append(f"{value}: ({' | '.join(map(json.dumps, words))}) {end}")
            elif not kinds or "string" in kinds:
                rules.append(f"{value}: AGENT_VALUE")
            else:
                python = [json.dumps(word) for kind in PYTHON_WORDS if kind in kinds for word in PYTHON_WORDS[kind]]
                rules.append(f"{value}: ({' | '.join([f'{value}_json', *python])}) {end}")
                rules.append(f"{value}_json: %json {json.dumps(within(schema, each))}")
            optional = "" if name in flat["required"] else "?"
            arguments.append(f"({_written(tags.before + name + tags.between)} {value}){optional}")
        if "additionalProperties" not in flat:
            arguments.append(f"({begin} AGENT_NAME {between} AGENT_VALUE)*")
        choices.append(" ".join(arguments) or '""')
    return [f"{rule}: {' | '.join(choices)}", *rules]


def _written(words: str, controls: Sequence[str] = ()) -> str:
    """Return a text in Lark syntax, with its control tokens, and with any id in place of the probe's id."""
    parts = re.split("(" + "|".join(map(re.escape, (*PROBE_IDS, *controls))) + ")", words)
    named = ("agent_id" if each in PROBE_IDS else lark_name(each) if n % 2 else _text(each)
             for n, each in enumerate(parts))  # fmt: skip
    return " ".join(named)


def _answer_rules(text: ResponseFormat | None) -> list[str]:
    """Return rules for `agent_text`; rules of a user's grammar keep their names, except `start`."""
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
    """Rename the rule `start` of a grammar to `agent_text`, except within texts and patterns."""
    parts = re.split(r'("(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*)', lark)
    return "".join(re.sub(r"\bstart\b", "agent_text", part) if n % 2 == 0 else part for n, part in enumerate(parts))


def _text(words: str) -> str:
    return json.dumps(words, ensure_ascii=False) if words else ""


def arguments_schema(tool: Tool, is_exact: bool = True) -> dict[str, Any]:
    """Return a tool's schema in the form that the grammar enforces on arguments; it allows every instance of the
    declared schema. Unless `is_exact`, unsupported parts are left to the check of the arguments.

    Raises:
        WorkbenchError: for an unsupported keyword, with the tool and the path.
    """
    return _carried_out(tool, is_exact)[0]


def _carried_out(tool: Tool, is_exact: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the schema of a tool's arguments for the grammar, and the parts left to the check of the arguments."""
    schema = {**tool.parameters, "type": "object"}
    if tool.function is not None and is_flat(schema):  # a Python function takes only named arguments
        schema["additionalProperties"] = False
    try:
        if not (is_exact or tool.strict):
            schema, left = widen(schema)
            return schema, [_of_tool(tool, each) for each in left]
        check_keywords(schema)
    except WorkbenchError as error:
        raise WorkbenchError(_of_tool(tool, str(error))) from None
    return schema, []


def _of_tool(tool: Tool, words: str) -> str:
    return f"tool {tool.name!r}: {words.replace(WHERE, 'parameters', 1)}"
