"""Learn from a chat template how a model writes calls of tools: the control tokens, and the JSON between them.

<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>        <|tool|>{"name": "f", "arguments": {...}}
[TOOL_CALLS][{"name": "f", "arguments": {...}}]                      <|python_tag|>{"name": "f", "parameters": {...}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from workbench.errors import WorkbenchError
from workbench.prompt.answers import ARGUMENT_FIELDS, AnswerFormat
from workbench.prompt.assemble import PromptReader
from workbench.prompt.conversation import Conversation
from workbench.prompt.tools import Tool
from workbench.prompt.turns import ToolCall

LISTED = ("[TOOL_CALLS]",)  # one control token before a list of all calls
PARAMETERS = ("<|python_tag|>",)
PROBE_TEXT, PROBE_TOOL = "probed text", "probed_tool"
PROBE = Tool(
    name=PROBE_TOOL,
    description="A probe.",
    parameters={"type": "object", "properties": {"x": {"type": "integer", "description": "x"}}, "required": ["x"]},
)


@dataclass(frozen=True)
class CallFormat:
    """The control tokens and the JSON of calls in an answer.

    Args:
        opening: the name of the control token before a call, or before the list of them.
        closing: that of the one after it; empty where there is none.
        before: text between `opening` and the JSON.
        after: text between the JSON and `closing`.
        between: text between two calls.
        head: the JSON of a call up to its arguments, with the name left to `format`.
        is_list: one `opening` begins a JSON list of all calls.
        is_spaced: its JSON has ", " and ": ", as `json.dumps` writes it.
        several: an answer may have several calls.
    """

    opening: str
    closing: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    head: str = '{{"name": {name}, "arguments": '
    is_list: bool = False
    is_spaced: bool = True
    several: bool = True

    @classmethod
    def from_model(cls, model: PromptReader, format: AnswerFormat, template: str | None = None) -> CallFormat | None:
        """Return the format of a model's calls as its template writes old ones; None if it has no token for them."""
        assert model.tokenizer is not None
        if format.call is None:
            return None
        opening, closing = ("" if id is None else model.tokenizer.decode([id], special=True) for id in format.call)
        for count in (2, 1):
            written = _written_calls(model, template, count)
            if written is not None and opening in written:
                found = cls._parse(written, opening, closing, count)
                if found is not None:
                    return found
        head = cls.head.replace("arguments", "parameters") if opening in PARAMETERS else cls.head
        line = "\n" if closing else ""
        return cls(opening, closing, line, line, line, head, opening in LISTED, several=opening not in PARAMETERS)

    @classmethod
    def _parse(cls, written: str, opening: str, closing: str, count: int) -> CallFormat | None:
        """Return the format of what was written behind the text of an answer with `count` calls."""
        first = written.split(opening)[1]
        inner, _, rest = first.partition(closing) if closing else (first, "", "")
        start = next((place for place, letter in enumerate(inner) if letter in "[{"), None)
        if start is None:
            return None
        try:
            value, length = json.JSONDecoder().raw_decode(inner[start:])
        except ValueError:
            return None
        is_list = isinstance(value, list)
        call = value[0] if isinstance(value, list) and value else value
        key = next((key for key in ARGUMENT_FIELDS if key in call), None) if isinstance(call, dict) else None
        if key is None or not isinstance(call, dict) or call.get("name") != PROBE_TOOL:
            return None
        spaced = '": ' in inner
        colon = ": " if spaced else ":"
        head = f'{{{{"name"{colon}{{name}}{"," + " " * spaced}"{key}"{colon}'
        after = inner[start + length :] if closing else ""
        several = count > 1 and (is_list or opening in written.split(opening, 1)[1])
        return cls(opening, closing, inner[:start], after, rest if several else "", head, is_list, spaced, several)


def shows_tools(model: PromptReader, template: str | None = None) -> bool:
    """Return whether a prompt says anything of the conversation's tools; True where the template refuses the test."""
    try:
        with_tools, without = (
            Conversation(tools=tools, turns=["a"], template=template).prompt(model).text for tools in ((PROBE,), ())
        )
    except WorkbenchError:
        return True
    return with_tools != without


def _written_calls(model: PromptReader, template: str | None, count: int) -> str | None:
    """Return what a template writes behind the text of an answer, for its calls; None where it refuses them."""
    calls = [ToolCall(name=PROBE_TOOL, arguments={"x": number}, id=f"call{number:05}") for number in range(count)]
    talk = Conversation(tools=[PROBE], turns=["a"], template=template).answer(PROBE_TEXT, tool_calls=calls)
    try:
        text = talk.prompt(model, add_generation_prompt=False).text
    except WorkbenchError:
        return None
    _, found, written = text.rpartition(PROBE_TEXT)
    return written if found else None
