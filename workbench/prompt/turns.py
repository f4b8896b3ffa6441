"""Turns of a conversation as values: user messages, model answers and tool results; and their conversion to messages in
OpenAI's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from workbench.display import truncate_text
from workbench.errors import WorkbenchError
from workbench.settings import Settings

SYSTEM_ROLES = ("system", "developer")
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names that clients use for a thought
UNPARSED = "unparsed"  # the argument that holds the raw text if a call's arguments are not an object
MAX_ARGUMENT_DEPTH = 48  # templates read messages of 64 levels, and arguments start at the sixth


def _join(content: Any) -> Any:
    parts = content if isinstance(content, list | tuple) else ()
    return "".join(content) if content is parts and all(isinstance(each, str) for each in parts) else content


# A string. Several parts are joined without a separator: few templates read all parts in every role.
Content = Annotated[str, BeforeValidator(_join)]


class ToolCall(Settings):
    """A tool call by the model."""

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""

    @classmethod
    def parse(cls, name: str, arguments: str | Mapping[str, Any], id: str = "") -> ToolCall:
        """Parse the arguments from the wire, a JSON object. Text that is not an object, is nested too deep to be
        rendered, or has an infinite number, is kept under `unparsed`, so a malformed call in a history never breaks
        later turns.
        """
        try:
            values = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else dict(arguments)
            if isinstance(values, dict) and not is_too_deep(values):
                json.dumps(values, allow_nan=False)  # 1e999 is infinite in Python, and infinity is not JSON
                return cls(name=name, arguments=values, id=id)
        except (ValueError, RecursionError):
            pass
        words = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return cls(name=name, arguments={UNPARSED: words}, id=id)


class UserTurn(Settings):
    """A user message, or with the role system an instruction after the first turn."""

    role: Literal["user", "system"] = "user"
    content: Content
    name: str | None = None


class AssistantTurn(Settings):
    """A model's answer: a thought, a text and tool calls.

    `generated_ids` are the generated tokens. If the turn is rendered to exactly their text, the prompt contains these
    tokens, so that the cached prefix reaches to the end of the answer.
    """

    role: Literal["assistant"] = "assistant"
    content: Content = ""
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    generated_ids: tuple[int, ...] = ()
    name: str | None = None


class ResultTurn(Settings):
    """A tool's result. `call_id` names the call; without it, results belong to the calls in order."""

    role: Literal["tool"] = "tool"
    content: Content
    name: str = ""
    call_id: str = ""


Turn = Annotated[UserTurn | AssistantTurn | ResultTurn, Field(discriminator="role")]


def is_too_deep(value: Any) -> bool:
    """Return whether arguments are nested deeper than `MAX_ARGUMENT_DEPTH`."""
    level = [value]
    for _ in range(MAX_ARGUMENT_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def unanswered_calls(turns: Sequence[UserTurn | AssistantTurn | ResultTurn]) -> list[ToolCall]:
    """Return the calls of the last answer that have no result yet."""
    waiting: list[ToolCall] = []
    for turn in turns:
        waiting = _waiting_after(waiting, turn)
    return waiting


def _waiting_after(waiting: list[ToolCall], turn: UserTurn | AssistantTurn | ResultTurn) -> list[ToolCall]:
    if isinstance(turn, AssistantTurn):
        return list(turn.tool_calls)
    if isinstance(turn, ResultTurn) and waiting:
        named = [each for each in waiting if each.id == turn.call_id] if turn.call_id else waiting
        place = waiting.index((named or waiting)[0])
        return waiting[:place] + waiting[place + 1 :]
    return waiting


def order_results(
    turns: tuple[UserTurn | AssistantTurn | ResultTurn, ...],
) -> tuple[UserTurn | AssistantTurn | ResultTurn, ...]:
    """Return the turns with the tool results at the end sorted in the order of the calls, if every result names its
    call.
    """
    first = len(turns)
    while first and isinstance(turns[first - 1], ResultTurn):
        first -= 1
    caller = turns[first - 1] if first else None
    calls = caller.tool_calls if isinstance(caller, AssistantTurn) else ()
    places = {call.id: place for place, call in enumerate(calls)}
    results = [turn for turn in turns[first:] if isinstance(turn, ResultTurn)]
    if len(results) < 2 or not all(each.call_id in places and each.call_id for each in results):
        return turns
    results.sort(key=lambda each: places[each.call_id])
    return (*turns[:first], *results)


def check_order(turns: Sequence[UserTurn | AssistantTurn | ResultTurn], first: int = 0) -> None:
    """Raise WorkbenchError unless, from turn `first` on, every result has a call and every call has a result before the
    next turn.

    Raises:
        WorkbenchError: names the turn.
    """
    waiting = unanswered_calls(turns[:first])
    for number in range(first, len(turns)):
        turn, where = turns[number], f"turns.{number}"
        if isinstance(turn, ResultTurn):
            waiting_ids = [call.id for call in waiting]
            if not waiting or (turn.call_id and any(waiting_ids) and turn.call_id not in waiting_ids):
                which = f" {turn.call_id!r}" if turn.call_id else ""
                raise WorkbenchError(f"{where}: a tool's result without a call{which} that waits for it; put it after "
                                     "the assistant's turn that called the tool")  # fmt: skip
        elif waiting:
            raise WorkbenchError(
                f"{where}: the call of {waiting[0].name!r} before it has no result; add a tool's result, also where it "
                "failed"
            )
        waiting = _waiting_after(waiting, turn)


def describe_turn(turn: UserTurn | AssistantTurn | ResultTurn) -> str:
    """Describe a turn in one line."""
    words = [turn.content]
    if isinstance(turn, AssistantTurn):
        words = [f"(thought: {truncate_text(turn.thinking or '', 40)})"] * bool(turn.thinking) + words
        words += [f"{each.name}({json.dumps(each.arguments, ensure_ascii=False)})" for each in turn.tool_calls]
    return " ".join(each for each in words if each)


def as_message(turn: UserTurn | AssistantTurn | ResultTurn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if isinstance(turn, AssistantTurn):
        if turn.thinking is not None:
            message["reasoning_content"] = turn.thinking
        if turn.tool_calls:
            message["tool_calls"] = [_call(each) for each in turn.tool_calls]
    if turn.name:
        message["name"] = turn.name
    if isinstance(turn, ResultTurn) and turn.call_id:
        message["tool_call_id"] = turn.call_id
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return {**named, "id": call.id} if call.id else named


def parse_turn(message: Any, where: str) -> UserTurn | AssistantTurn | ResultTurn:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise WorkbenchError(f"{where}: must be an object with a role and a content")
    role, content = message["role"], message.get("content")
    if role == "user" or role in SYSTEM_ROLES:  # templates use the role system for an instruction
        kind = "user" if role == "user" else "system"
        return UserTurn(role=kind, content=parse_content(content, f"{where}.content"), name=message.get("name"))
    if role in ("tool", "function"):
        words = parse_content(content, f"{where}.content")
        return ResultTurn(content=words, name=message.get("name") or "", call_id=message.get("tool_call_id") or "")
    if role == "assistant":
        calls = tuple(
            _parsed_call(each, f"{where}.tool_calls.{n}") for n, each in enumerate(message.get("tool_calls") or ())
        )
        words = "" if content in (None, []) and calls else parse_content(content, f"{where}.content")
        thought = next((message[name] for name in THOUGHT_FIELDS if message.get(name)), None)
        return AssistantTurn(content=words, thinking=thought, tool_calls=calls, name=message.get("name"))
    raise WorkbenchError(f"{where}.role: {role!r} is unknown; known: system, user, assistant, tool")


def _parsed_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise WorkbenchError(f'{where}: must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}')
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str | Mapping):
        raise WorkbenchError(f"{where}.function.arguments: must be an object, or a text that is a JSON object")
    return ToolCall.parse(function["name"], arguments, str(call.get("id") or ""))


def parse_content(content: Any, where: str) -> str:
    """Return the text of a message's content with its parts joined; WorkbenchError for parts that are not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise WorkbenchError(f"{where}: must be a text, or a list of parts of type 'text'")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(kind, str) and kind != "text":
            raise WorkbenchError(f"{where}.{number}: a part of type {kind!r}; models here read text, so give its text")
        else:
            raise WorkbenchError(f'{where}.{number}: must be {{"type": "text", "text": ...}}')
    return "".join(texts)
