"""Parse tool calls from the JSON text of an answer while it arrives: the name, then arguments as they are generated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from workbench.prompt.answers import ARGUMENT_FIELDS, BETWEEN_CALLS, AnswerFormat
from workbench.prompt.turns import ToolCall


@dataclass(frozen=True)
class CallText:
    """A part of a tool call: its `name` when the call begins, or the next part of the JSON text of its arguments."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass
class ToolCallText:
    """A parser of the text of one or several calls: `{"name": "f", "arguments": {...}}`, or a list of such objects.

    Text before a name is held back, since a text without a name is no call. A call in another form, and text behind
    the calls, is parsed at the end. `first` is the index of the first call, `format` the answer's call format.
    """

    first: int = 0
    format: AnswerFormat = AnswerFormat()
    text: str = ""
    num_calls: int = 0
    _place: int = 0  # index of the first unread character
    _depth: int = 0
    _call_depth: int = 1  # nesting depth of a call's keys: 2 in a list
    _string_start: int | None = None
    _escaped: bool = False
    _is_key: bool = False
    _key: str = ""
    _name: str = ""
    _value_start: int | None = None  # start of the value being read, at the depth of a call's keys
    _shown: int = 0  # end of the arguments returned so far
    _is_open: bool = False
    _end: int = 0  # end of the calls read so far
    _is_over: bool = False  # the rest holds no call to parse while it arrives
    _has_arguments: bool = False
    _late: list[str] = field(default_factory=list)  # arguments that came before the name

    def push(self, text: str) -> list[CallText]:
        """Take more text; return the parts of calls known now."""
        self.text += text
        found: list[CallText] = []
        if self.text.lstrip()[:1] not in ("{", "["):
            return found
        while self._place < len(self.text) and not self._is_over:
            self._read(self.text[self._place], self._place, found)
            self._place += 1
        self._show_arguments(len(self.text), found)
        return found

    def finish(self) -> tuple[list[CallText], str]:
        """Return (the remaining parts of calls, the text outside of calls) at the end of the answer."""
        if not self._is_open:
            rest, first = self.text[self._end :].lstrip(BETWEEN_CALLS), self.first + self.num_calls
            calls: list[ToolCall] = []
            if not self.num_calls or rest.startswith("{"):
                calls, rest = self.format.read_calls(rest)
            self.num_calls += len(calls)
            return [
                part
                for place, call in enumerate(calls, first)
                for part in (CallText(place, call.name), CallText(place, "", json.dumps(call.arguments)))
            ], rest
        parts = [] if self._has_arguments else [CallText(self._index, "", "{}")]
        self._is_open = False
        return parts, ""

    @property
    def _index(self) -> int:
        return self.first + self.num_calls - 1

    def _read(self, letter: str, place: int, found: list[CallText]) -> None:
        if self._string_start is not None:
            if self._escaped or letter == "\\":
                self._escaped = not self._escaped
            elif letter == '"':
                self._end_string(place, found)
            return
        if not self._depth and letter == "[" and not self.num_calls:
            self._depth, self._call_depth = 1, 2
        elif not self._depth and letter != "{":
            self._is_over = letter not in BETWEEN_CALLS
        elif letter == '"':
            self._begin_value(place)
            self._string_start = place
        elif letter in "{[":
            self._begin_value(place)
            self._depth += 1
            self._is_key = self._is_key or self._depth == self._call_depth
        elif letter in "}]":
            self._depth -= 1
            if self._depth == self._call_depth:
                self._end_value(place + 1, found)
            elif self._depth == self._call_depth - 1 and letter == "}":
                self._end_value(place, found)
                self._end_call(place + 1, found)
            if not self._depth and self._call_depth == 2:  # end of the list
                self._is_over, self._end = True, place + 1 if self.num_calls else 0
        elif letter == "," and self._depth == self._call_depth:
            self._end_value(place, found)
            self._is_key = True
        elif letter == ":" and self._depth == self._call_depth:
            self._is_key = False
        elif not letter.isspace():
            self._begin_value(place)

    def _begin_value(self, place: int) -> None:
        if self._depth == self._call_depth and not self._is_key and self._key and self._value_start is None:
            self._value_start = self._shown = place

    def _end_string(self, place: int, found: list[CallText]) -> None:
        start, self._string_start = self._string_start, None
        if self._depth != self._call_depth:
            return
        if self._is_key:
            self._key = _string(self.text[start : place + 1])
        elif self._value_start is not None:
            self._end_value(place + 1, found)

    def _end_value(self, end: int, found: list[CallText]) -> None:
        if self._value_start is None:
            return
        raw = self.text[self._value_start : end].strip()
        if self._key == "name" and raw.startswith('"'):
            self._begin_call(_string(raw), found)
        elif self._key in ARGUMENT_FIELDS:
            self._has_arguments = True
            if not self._is_open:
                self._late.append(raw)
            elif raw.startswith('"'):  # arguments as a JSON string
                found.append(CallText(self._index, "", _string(raw)))
            else:
                self._show_arguments(end, found)
        self._value_start, self._key = None, ""

    def _begin_call(self, name: str, found: list[CallText]) -> None:
        if not name or self._is_open:
            return
        if self.format.is_bare and name not in {tool.name for tool in self.format.tools}:
            return
        self.num_calls += 1
        self._is_open = True
        found.append(CallText(self._index, name))
        for raw in self._late:
            found.append(CallText(self._index, "", _string(raw) if raw.startswith('"') else raw))
        self._late.clear()

    def _end_call(self, end: int, found: list[CallText]) -> None:
        if self._is_open and not self._has_arguments:
            found.append(CallText(self._index, "", "{}"))
        self._is_over, self._end = not self._is_open, end if self._is_open else self._end
        self._is_open = self._has_arguments = False
        self._key, self._late = "", []

    def _show_arguments(self, end: int, found: list[CallText]) -> None:
        """Add the arguments up to `end` to `found`, if they are an object being read."""
        start = self._value_start
        if start is None or self._key not in ARGUMENT_FIELDS or not self._is_open or self.text[start] == '"':
            return
        if end > self._shown:
            found.append(CallText(self._index, "", self.text[self._shown : end]))
            self._has_arguments, self._shown = True, end


def _string(raw: str) -> str:
    try:
        found = json.loads(raw)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""
