"""Infer from a chat template how a model writes tool calls: the control tokens, and the text between them.

<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>        <|tool|>{"name": "f", "arguments": {...}}
[TOOL_CALLS][{"name": "f", "arguments": {...}}]                      <|python_tag|>{"name": "f", "parameters": {...}}
[TOOL_CALLS]f[ARGS]{...}                                             {"name": "f", "parameters": {...}}
<tool_call>\\n<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>\\n</tool_call>
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from os.path import commonprefix

from workbench.errors import WorkbenchError
from workbench.prompt.answers import ARGUMENT_FIELDS, AnswerFormat, control_tokens
from workbench.prompt.assemble import PromptReader
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import behind_prompt
from workbench.prompt.tools import Tool
from workbench.prompt.turns import ToolCall

LISTED = ("[TOOL_CALLS]",)  # one control token before a list of all calls
PARAMETERS = ("<|python_tag|>",)
PROBE_TEXT, PROBE_TOOL = "probed text", "probed_tool"
PROBE_IDS = "call00000", "call00001"  # ids that a template may write with calls; a model generates its own
KEYS, VALUES = ("probed_x", "probed_y"), ("probed_value", "another_value")
PROBE = Tool(
    name=PROBE_TOOL,
    description="A probe.",
    parameters={
        "type": "object",
        "properties": {key: {"type": "string", "description": "x"} for key in KEYS},
        "required": [*KEYS],
    },
)


@dataclass(frozen=True)
class TaggedArguments:
    """The tags around arguments that a call writes one by one, each as `before` name `between` value `after`."""

    before: str
    between: str
    after: str


@dataclass(frozen=True)
class CallFormat:
    """The control tokens of tool calls in an answer, and the text between them.

    Args:
        opening: the name of the control token before a call, or before the list of calls; empty if a call is JSON at
            the beginning of an answer.
        closing: the name of the control token after it; empty if there is none.
        before: text between `opening` and the call.
        after: text between the call and `closing`.
        between: text between two calls.
        head: the part of a call before its arguments, with PROBE_TOOL as its name.
        tail: the part of a call after its arguments.
        tags: tags around each argument; None if the arguments are one JSON object.
        is_list: one `opening` begins a JSON list of all calls.
        is_group: one `opening` begins all calls, with the text `between` from one call to the next.
        is_shown: the template writes calls this way; else it writes none, and a model may know another form.
        thought: the control tokens around a thought, which may precede a text; empty if there are none.
        is_spaced: its JSON has ", " and ": ", like `json.dumps`.
        several: an answer may have several calls.
    """

    opening: str
    closing: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    head: str = f'{{"name": "{PROBE_TOOL}", "arguments": '
    tail: str = "}"
    tags: TaggedArguments | None = None
    is_list: bool = False
    is_spaced: bool = True
    several: bool = True
    is_group: bool = False
    is_shown: bool = True
    thought: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()  # control tokens within a call

    @classmethod
    def from_model(cls, model: PromptReader, format: AnswerFormat, template: str | None = None) -> CallFormat | None:
        """Return the format of a model's calls, as its template writes earlier calls; the usual form of the model's
        token for calls, if the template writes none. None if the model has no such token, or the form is unknown.
        """
        assert model.tokenizer is not None
        if format.call is None and not format.is_bare:
            return None
        call = None if format.is_bare else format.call
        names = (model.tokenizer.decode([id], special=True) if id is not None else "" for id in call or (None, None))
        opening, closing = names
        if opening and not {opening, closing or opening} <= control_tokens(model.tokenizer).keys():
            return None
        is_written = False
        one = (
            model.chat_template is not None
            and model.chat_template.call_habits(model.chat_template.choose(template, tools=True)).wants_one_call
        )
        for count in (1,) if one else (2, 1):
            written = _written_calls(model, template, count)
            is_written |= written is not None and any(each in written for each in (opening or VALUES[0], VALUES[0]))
            if written is not None and opening in written:
                found = cls._parse(written, opening, closing, count)
                if found is not None:
                    inner = f"{found.before}{found.head}{found.tail}{found.between}{found.after}"
                    within = tuple(name for name in control_tokens(model.tokenizer) if name in inner)
                    thought = tuple(model.tokenizer.decode([id], special=True) for id in format.thought or ())
                    return replace(found, controls=within, thought=thought)
        if is_written or format.is_bare:
            return None
        head = cls.head.replace("arguments", "parameters") if opening in PARAMETERS else cls.head
        line = "\n" if closing else ""
        return cls(
            opening, closing, line, line, line, head, is_list=opening in LISTED, several=opening not in PARAMETERS,
            is_shown=False,
        )  # fmt: skip

    @classmethod
    def _parse(cls, written: str, opening: str, closing: str, count: int) -> CallFormat | None:
        """Return the format of `written`, the text after an answer with `count` calls; None for an unknown form."""
        first = written.split(opening)[1] if opening else written
        inner, _, rest = first.partition(closing) if closing else (first, "", "")
        several = count > 1 and bool(opening) and opening in written.split(opening, 1)[1]
        between = rest if several else ""
        start = next((place for place, letter in enumerate(inner) if letter in "[{"), None)
        name = inner.find(PROBE_TOOL)
        if name < 0:
            return None
        place = inner.find("{", name)
        arguments = _decoded(inner, place) if place >= 0 else None
        if start is not None and start < name and (decoded := _decoded(inner, start)) is not None:
            value, end = decoded
            is_list = isinstance(value, list)
            call = value[0] if isinstance(value, list) and value else value
            if not isinstance(call, dict) or call.get("name") != PROBE_TOOL:
                return None
            key = next((key for key in ARGUMENT_FIELDS if key in call), None)
            if key is None:
                return None
            spaced = '": ' in inner
            colon = ": " if spaced else ":"
            head = f'{{"name"{colon}"{PROBE_TOOL}"{"," + " " * spaced}"{key}"{colon}'
            several = several or (count > 1 and is_list)
            after, before = inner[end:] if closing else "", inner[:start] if opening else ""  # a bare call is first
            found = cls(opening, closing, before, after, between, head, "}", None, is_list, spaced, several)
            second = _decoded(inner, again := inner.find("{", end))
            return found if is_list or second is None else found._grouped(inner, end, again, second[1])
        if arguments is not None and isinstance(arguments[0], dict) and arguments[0].keys() == set(KEYS):
            spaced, after = '": ' in inner, inner[arguments[1] :] if closing else ""
            head = inner[name:place]
            found = cls(opening, closing, inner[:name], after, between, head, "", None, False, spaced, several)
            again = inner.find(PROBE_TOOL, arguments[1])
            second = _decoded(inner, inner.find("{", again)) if again >= 0 else None
            return found if second is None else found._grouped(inner, arguments[1], again, second[1])
        head, tags = _tags(inner, name + len(PROBE_TOOL)) if closing else ("", None)
        if tags is None:
            return None
        tail = inner.rpartition(VALUES[1])[2].removeprefix(tags.after)
        found = cls(opening, closing, inner[:name], "", between, PROBE_TOOL + head, tail, tags, False, True, several)
        end = inner.find(VALUES[1]) + len(VALUES[1] + tags.after)
        again = inner.find(PROBE_TOOL, end)
        whole = replace(found, tail="")
        return found if again < 0 else whole._grouped(inner, end, again, len(inner) - len(tail))

    def _grouped(self, inner: str, end: int, again: int, last: int) -> CallFormat:
        """Return the format of calls in one pair of control tokens: the first call ends at `end`, the second begins
        at `again` and ends at `last`."""
        if not self.opening:  # an answer of bare JSON has one call
            return self
        return replace(self, between=inner[end:again], after=inner[last:], several=True, is_group=True)


def _decoded(text: str, place: int) -> tuple[object, int] | None:
    """Return the JSON value that begins at `place`, and its end; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except ValueError:
        return None


def _tags(inner: str, start: int) -> tuple[str, TaggedArguments | None]:
    """Return the text between a tool's name and its arguments, and the tags around each argument; None if the arguments
    are not shown."""
    places, place = [], start
    for word in (KEYS[0], VALUES[0], KEYS[1], VALUES[1]):
        found = inner.find(word, place)
        if found < 0:
            return "", None
        places.append(inner[place:found])
        place = found + len(word)
    first, between, both, second = places
    before = commonprefix([first[::-1], both[::-1]])[::-1]
    after = both.removesuffix(before)
    is_known = between == second and bool(between and after) and inner.startswith(after, place)
    return first.removesuffix(before), TaggedArguments(before, between, after) if is_known else None


def _written_calls(model: PromptReader, template: str | None, count: int) -> str | None:
    """Return the text that a template writes for an answer's calls, after the answer's text or, if it omits that, after
    the prompt; None if it refuses calls."""
    arguments = dict(zip(KEYS, VALUES, strict=True))
    calls = [ToolCall(name=PROBE_TOOL, arguments=arguments, id=id) for id in PROBE_IDS[:count]]
    asked = Conversation(tools=[PROBE], turns=["a"], template=template)
    for content in (PROBE_TEXT, ""):  # some templates write calls only without a text
        try:
            text = asked.answer(content, tool_calls=calls).prompt(model, add_generation_prompt=False).text
            prompt = asked.prompt(model).text
        except WorkbenchError:
            return None
        written = text.rpartition(content)[2] if content and content in text else behind_prompt(text, prompt)
        if VALUES[0] in written:
            return written
    return written
