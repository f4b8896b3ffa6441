"""Parse an answer from its tokens as they arrive: reasoning, text and tool calls.

Channels begin and end at control tokens, never at text that spells them. Each channel has its own detokenizer, which is
finished at the channel's end, so held-back text stays in its channel. An answer that begins with JSON is a call only if
the template writes calls without control tokens (Llama 3.1 to 3.3) and the JSON names one of the tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from workbench.prompt.call_texts import read_calls
from workbench.prompt.templates import PROBED, PROBED_ARGUMENTS, ChatTemplate
from workbench.prompt.tokenization.detokenize import Detokenizer
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import Tool
from workbench.prompt.turns import UNPARSED, AssistantTurn, ToolCall, is_too_deep

THOUGHTS = (("<|think|>", "<|/think|>"), ("<think>", "</think>"), ("[THINK]", "[/THINK]"))
CALLS = (
    ("<tool_call>", "</tool_call>"), ("<|tool|>", ""), ("[TOOL_CALLS]", ""), ("<|python_tag|>", ""),
    ("<minimax:tool_call>", "</minimax:tool_call>"), ("<|tool_call|>", "<|/tool_call|>"), ("<|tool_call|>", ""),
)  # fmt: skip
ARGUMENT_FIELDS = ("arguments", "parameters")
BETWEEN_CALLS = " \t\r\n;,"  # that are JSON
Channel = Literal["thought", "text", "call"]
_PROBED = Tool(name=PROBED, parameters={})


def _find_call_marks(template: ChatTemplate, tokenizer: Tokenizer, name: str | None) -> list[tuple[str, str]]:
    """Return the names of the control tokens that a template writes before and after calls. The second is empty if the
    template writes none; the list is empty if it writes no control token before a call, or a call syntax that is not
    parsed here.
    """
    text, ids = template.written_call(name) or "", template.encoder(tokenizer, name).control_ids
    ends = {tokenizer.decode([id], special=True) for id in template.end_token_ids(tokenizer, name)}
    names = sorted(ids, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    call = next((n for n, each in enumerate(parts) if PROBED in each), 0)
    value = next((n for n, each in enumerate(parts) if PROBED_ARGUMENTS["x"] in each), len(parts))
    end = next((n for n in range(1, len(parts), 2) if parts[n] in ends), len(parts))
    thoughts = {mark for pair in THOUGHTS for mark in pair}
    opening = next((n for n in range(1, call, 2) if parts[n] not in thoughts), None)
    closing = max(range(value + 1, end, 2), default=None)
    if opening is None:
        return []
    controls = tokenizer.special_token_ids  # they have no text
    inner = "".join(each for each in parts[opening + 1 : closing or end] if each not in controls)
    is_read = split_calls(inner, (_PROBED,))[0] == [ToolCall(name=PROBED, arguments=PROBED_ARGUMENTS)]
    return [(parts[opening], "" if closing is None else parts[closing])] if is_read else []


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of a tokenizer's control tokens by name: its special tokens, and the marks of thoughts and calls,
    which are not special tokens in Qwen's tokenizers.
    """
    marks = {name for pair in (*THOUGHTS, *CALLS) for name in pair}
    return tokenizer.special_token_ids | {k: v for k, v in tokenizer.added_token_ids.items() if k in marks}


class ChannelText(NamedTuple):
    """A piece of an answer: the text to show now, its channel (thought, text or call), and for a call the
    call's index.
    """

    channel: Channel
    index: int
    text: str


@dataclass(frozen=True)
class AnswerFormat:
    """The control tokens of a model's answers: those around a thought and those around a call.

    Args:
        thought: the control tokens around a thought, by id; None where a model has none.
        call: the control tokens around a call, by id.
        tools: the tools that may be called; their schemas give the types of arguments written in tags.
        is_bare: an answer that begins with JSON may be a call.
        short_ids: call ids have nine letters or digits.
    """

    thought: tuple[int, int] | None = None
    call: tuple[int, int | None] | None = None
    tools: tuple[Tool, ...] = field(default=(), compare=False)
    is_bare: bool = False
    short_ids: bool = False

    @classmethod
    def from_template(
        cls, template: ChatTemplate, tokenizer: Tokenizer, name: str | None = None, tools: Iterable[Tool] = ()
    ) -> AnswerFormat:
        """Return the answer format of a template: the first known pairs of control tokens that the template writes, or
        else that the tokenizer has. If the template writes a call that can be parsed, the control tokens around that
        call are preferred.
        """
        ids, literals = template.encoder(tokenizer, name).control_ids, template.literals(name)

        def pairs(known: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
            there = [(a, b) for a, b in known if a in ids and (not b or b in ids)]
            return sorted(there, key=lambda pair: not any(each and each in literals for each in pair))

        thought = next(((ids[a], ids[b]) for a, b in pairs(THOUGHTS)), None)
        known, tools, encoder = pairs(CALLS), tuple(tools), template.encoder(tokenizer, name)
        if tools and encoder.call_marks is None:
            encoder.call_marks = _find_call_marks(template, tokenizer, name)
        written = (encoder.call_marks or []) if tools else []
        known = [pair for pair in known if pair[0] in dict(written)] or [*written, *known]
        call = next(((ids[a], ids.get(b)) for a, b in known), None)
        if not tools:
            return cls(thought, call, tools, False, False)
        habits = template.call_habits(name)
        return cls(thought, call, tools, habits.writes_bare_calls, habits.wants_short_ids)

    def read_calls(self, text: str) -> tuple[list[ToolCall], str]:
        """Return the calls at the start of a call's text, and the remaining text; a call without control tokens must
        name an allowed tool.
        """
        return split_calls(text, self.tools, self.is_bare)

    def ends_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the prompt already opens the answer's thought."""
        last = next((id for id in reversed(prompt_ids) if self.thought and id in self.thought), None)
        return self.thought is not None and last == self.thought[0]


class AnswerParser:
    """A parser of one answer. `in_thought`: the prompt ends within a thought that the template began. `stops`: stop
    strings, which end the answer and are cut off. `before`: the prompt's token ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: AnswerFormat,
        in_thought: bool = False,
        stops: tuple[str, ...] = (),
        before: Sequence[int] = (),
    ):
        self._tokenizer, self._format, self._stops = tokenizer, format, stops
        self._before = tokenizer.context(before)
        self._ids: list[int] = []
        self._texts: list[tuple[Channel, int, list[str]]] = []
        self._calls = 0
        self._begin("thought" if in_thought else "text")

    @property
    def channel(self) -> Channel:
        """Return the channel that is open now: thought, text or call."""
        return self._channel

    def push(self, token_id: int) -> list[ChannelText]:
        """Take the next token; return the pieces to show now."""
        self._ids.append(token_id)
        thought, call = self._format.thought or (None, None), self._format.call or (None, None)
        if token_id == thought[0] and self._channel == "text":
            return self._switch("thought")
        if token_id == thought[1] and self._channel == "thought":
            return self._switch("text")
        if token_id == call[0] and self._channel != "thought":
            return self._switch("call")
        if token_id == call[1] and self._channel == "call":
            return self._switch("text")
        if not self._tokenizer.has(token_id):  # it has no text; the engine ends the answer at it
            return []
        return self._show(self._detokenizer.push(token_id))

    def finish(self) -> list[ChannelText]:
        """End the answer and return the held-back pieces."""
        lead, self._lead = self._lead or "", None
        return self._show(lead + self._detokenizer.finish())

    def text(self, channel: Channel) -> str:
        """Return the text of a channel so far."""
        return "".join(text for each, _, text in self._joined() if each == channel)

    def turn(self) -> AssistantTurn:
        """Return the answer so far as a turn, with its tokens. A call that is not a JSON object with a name becomes
        text.
        """
        joined = self._joined()
        first_call = next((n for n, (channel, _, _) in enumerate(joined) if channel == "call"), len(joined))
        thoughts = [text for channel, _, text in joined if channel == "thought"]
        content = "".join(text for channel, _, text in joined[:first_call] if channel == "text")
        rest: list[str] = []
        calls: list[ToolCall] = []
        for channel, _, text in joined[first_call:]:
            tool_calls, text = self._format.read_calls(text) if channel == "call" else ([], text)
            calls += tool_calls
            rest += [text] * (bool(text.strip()) and channel != "thought")
        if calls and self._format.call is not None and self._format.call[1] is not None:
            content = content.removesuffix("\n")  # between a text and a call
        return AssistantTurn(
            content="".join([content, *rest]),
            thinking="".join(thoughts) if thoughts else None,
            tool_calls=tuple(calls),
            generated_ids=tuple(self._ids),
        )

    def _joined(self) -> list[tuple[Channel, int, str]]:
        return [(channel, index, "".join(texts)) for channel, index, texts in self._texts]

    def _switch(self, channel: Channel) -> list[ChannelText]:
        pieces = self.finish()
        self._begin(channel)
        return pieces

    def _begin(self, channel: Channel) -> None:
        stops = () if channel == "thought" else self._stops
        self._detokenizer = Detokenizer(self._tokenizer, stops, (*self._before, *self._ids))
        may_call = self._format.is_bare and channel == "text" and not self._calls
        self._lead: str | None = "" if may_call else None  # spaces before what may be a call without a token
        self._open(channel)

    def _open(self, channel: Channel) -> None:
        self._calls += channel == "call"
        self._channel: Channel = channel
        self._texts.append((channel, max(0, self._calls - 1) if channel == "call" else 0, []))

    def _show(self, text: str) -> list[ChannelText]:
        if self._lead is not None:
            text, self._lead = self._lead + text, None
            if not text.strip():
                self._lead, text = text, ""
            elif text.lstrip()[0] in "{[":
                self._open("call")
        channel, index, texts = self._texts[-1]
        texts.append(text)
        return [ChannelText(channel, index, text)] if text else []


def parse_answer(
    ids: Iterable[int],
    tokenizer: Tokenizer,
    format: AnswerFormat,
    in_thought: bool = False,
    before: Sequence[int] = (),
) -> AssistantTurn:
    """Return the turn that an answer's tokens spell after the prompt `before`."""
    parser = AnswerParser(tokenizer, format, in_thought, before=before)
    for id in ids:
        parser.push(id)
    parser.finish()
    return parser.turn()


def parse_calls(text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """Return the calls at the start of a text."""
    return split_calls(text, tools)[0]


def split_calls(text: str, tools: Sequence[Tool] = (), is_bare: bool = False) -> tuple[list[ToolCall], str]:
    """Return the calls at the start of a text, and the remaining text. Calls are consecutive JSON objects with a name,
    a list of such objects, or any syntax that `read_calls` knows. A call ends where its JSON ends. `is_bare`: each call
    must name one of the tools.
    """
    tool_names = {tool.name for tool in tools}
    if text.lstrip()[:1] not in ("{", "["):
        calls = read_calls(text, tools)
        is_call = bool(calls) and not (is_bare and any(call.name not in tool_names for call in calls))
        return (calls, "") if is_call else ([], text)

    def named(value: Any) -> Any:
        """Return the call in a JSON value, also in the form `{"type": "function", "function": {...}}` of the APIs."""
        inner = value.get("function") if isinstance(value, dict) and "name" not in value else None
        value = inner if isinstance(inner, dict) and inner.get("name") in tool_names else value
        name = value.get("name") if isinstance(value, dict) else None
        return value if isinstance(name, str) and (name in tool_names or not is_bare) else None

    calls, place = list[ToolCall](), 0
    while text[place:].lstrip(BETWEEN_CALLS)[:1] == "{" or not place:
        begin = len(text) - len(text[place:].lstrip(BETWEEN_CALLS))
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
            values = [named(each) for each in (value if isinstance(value, list) else [value])]
            made = [_call(each, text[begin:end]) for each in values] if all(values) else []
        except (ValueError, RecursionError):
            cut, end = named(parse_partial_json(text[begin:])), len(text)
            made = [ToolCall.parse(cut["name"], text[begin:])] if cut and cut["name"] else []
        if not made:
            break
        calls, place = calls + made, end
    return calls, text[place:] if text[place:].strip(BETWEEN_CALLS) else ""


def _call(value: dict[str, Any], text: str) -> ToolCall:
    arguments = _arguments(value)
    if is_too_deep(arguments):
        return ToolCall(name=value["name"], arguments={UNPARSED: text})
    return ToolCall.parse(value["name"], arguments)


def _arguments(call: dict[str, Any]) -> Any:
    value = next((call[name] for name in ARGUMENT_FIELDS if call.get(name) is not None), {})
    return value if isinstance(value, dict | str) or is_too_deep(value) else json.dumps(value)


def parse_partial_json(text: str) -> Any:
    """Parse the beginning of a JSON text: its complete parts, and an unfinished string up to its end.

    Return None if no part is complete. An unfinished number or word is kept if it is already valid.
    """
    closers: list[str] = []
    safe: tuple[int, str] | None = None  # the complete text up to here, and the brackets that close it
    in_string = escaped = False
    for place, letter in enumerate(text):
        if in_string:
            escaped, in_string = (letter == "\\" and not escaped), (letter != '"' or escaped)
            continue
        if letter == '"':
            in_string = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
            safe = (place + 1, "".join(reversed(closers)))
        elif letter in "}]" and closers:
            closers.pop()
            safe = (place + 1, "".join(reversed(closers)))
        elif letter == ",":
            safe = (place, "".join(reversed(closers)))
    end = "".join(reversed(closers))
    tries = [_closed_string(text) + end] if in_string else [text + end]
    tries += [text[: safe[0]] + safe[1]] if safe is not None else []
    for each in tries:
        try:
            return json.loads(each)
        except (ValueError, RecursionError):
            continue
    return None


def _closed_string(text: str) -> str:
    """Close the unfinished string at a text's end; drop an incomplete escape."""
    at = text.rfind("\\")
    if at >= 0 and not _is_escaped(text, at) and len(text) - at < (6 if text[at + 1 : at + 2] == "u" else 2):
        text = text[:at]
    return text + '"'


def _is_escaped(text: str, place: int) -> bool:
    """Return whether the backslash at `place` is the second of a pair."""
    before: Sequence[str] = text[:place]
    count = len(before) - len(text[:place].rstrip("\\"))
    return count % 2 == 1
