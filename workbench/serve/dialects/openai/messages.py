"""Read OpenAI's messages and tools into a conversation, with the cache breakpoints of their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import SYSTEM_ROLES, THOUGHT_FIELDS, Turn, parse_content, parse_turn
from workbench.serve.bodies.fields import IgnoredFields
from workbench.serve.call import Breakpoint
from workbench.serve.errors import ApiError, invalid_field

# Fields of a message by its role; fields of other roles are refused.
FIELDS = {
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "tool_calls", "name", *THOUGHT_FIELDS),
    "tool": ("role", "content", "tool_call_id", "name"),
    "function": ("role", "content", "name"),
    **dict.fromkeys(SYSTEM_ROLES, ("role", "content", "name")),
}
ALL_FIELDS = frozenset(name for names in FIELDS.values() for name in names)
# Refused unless neutral, since they would change the answer. The last three are other servers' forms of continuing.
REFUSED_FIELDS = ("audio", "function_call", "refusal", "prefix", "partial", "prefill")
IGNORED_FIELDS = {"annotations": "no chat template shows it"}  # in an answer sent back
BREAKPOINT = "prompt_cache_breakpoint"
PART_FIELDS = ("type", "text", BREAKPOINT)
TOOL_FIELDS, FUNCTION_FIELDS = ("type", "function"), ("name", "description", "parameters", "strict")
CALL_FIELDS, CALLED_FIELDS = ("id", "type", "function", "index"), ("name", "arguments")
LIFETIMES = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0}
DEFAULT_LIFETIME = "30m"


def read_conversation(
    messages: Sequence[Mapping[str, Any]],
    tools: Iterable[Mapping[str, Any]],
    ignored: IgnoredFields | None = None,
    continues: bool = False,
) -> tuple[Conversation, tuple[Breakpoint, ...]]:
    """Return the conversation and its breakpoints (ApiError or WorkbenchError with the path of the error).

    Ignored fields go into `ignored`; without it, unknown fields are refused.
    """
    ignored = IgnoredFields(is_strict=True) if ignored is None else ignored
    system: list[str] = []
    turns: list[Turn] = []
    breakpoints: list[Breakpoint] = []
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        _check_message(message, where, ignored)
        content, lifetimes = _without_breakpoints(message.get("content"), where, ignored)
        if message.get("role") in SYSTEM_ROLES and not turns:
            system.append(parse_content(content, f"{where}.content"))
            part, index = "system", sum(map(len, system))
        else:
            turns.append(parse_turn({**message, "content": content}, where))
            part, index = "turn", len(turns) - 1
        breakpoints += [Breakpoint(part, index, seconds) for seconds in lifetimes]
    declared = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:50]
            raise invalid_field(f"tools.{number}.type", f"{kind!r} is not supported; use function")
        tool = ignored.check(tool, TOOL_FIELDS, f"tools.{number}")  # a template may show the whole declaration
        if isinstance(tool.get("function"), Mapping):
            tool["function"] = ignored.check(tool["function"], FUNCTION_FIELDS, f"tools.{number}.function")
        declared.append(tool)
    whole = "".join(system) if system else None
    found = Conversation(system=whole, tools=tuple(declared), turns=tuple(turns), continues=continues)
    return found, tuple(breakpoints)


def continues_last(continue_final_message: bool | None, add_generation_prompt: bool | None) -> bool:
    """Return whether vLLM's two fields ask to continue the last message (ApiError for unsupported combinations)."""
    if continue_final_message and add_generation_prompt:
        words = "begins a message, and continue_final_message goes on with one; give one"
        raise invalid_field("add_generation_prompt", words)
    if add_generation_prompt is False and not continue_final_message:
        words = "add_generation_prompt: false is not supported without continue_final_message: the model would " \
                "continue the user's text"  # fmt: skip
        raise ApiError("invalid_request_error", words, "add_generation_prompt", "unsupported")
    return bool(continue_final_message)


def _check_message(message: Mapping[str, Any], where: str, ignored: IgnoredFields) -> None:
    for name in REFUSED_FIELDS:
        if message.get(name):
            raise invalid_field(f"{where}.{name}", "is not supported")
    role = str(message.get("role"))
    known = FIELDS.get(role)
    if known is not None:  # an unknown role is refused later
        for name in ALL_FIELDS.difference(known):
            if message.get(name) is not None:
                raise invalid_field(f"{where}.{name}", f"does not belong to a message of the role {role}")
        for name in IGNORED_FIELDS:
            if message.get(name):
                ignored.add(f"{where}.{name}", IGNORED_FIELDS[name])
        ignored.check(message, (*known, *REFUSED_FIELDS, *IGNORED_FIELDS), where)
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, Mapping):
            ignored.check(call, CALL_FIELDS, f"{where}.tool_calls.{number}")
            if isinstance(call.get("function"), Mapping):
                ignored.check(call["function"], CALLED_FIELDS, f"{where}.tool_calls.{number}.function")


def _without_breakpoints(content: Any, where: str, ignored: IgnoredFields) -> tuple[Any, list[float]]:
    """Return a content without its breakpoints, and the breakpoints' lifetimes in seconds."""
    if not isinstance(content, list):
        return content, []
    found: list[float] = []
    parts = []
    for number, part in enumerate(content):
        if isinstance(part, Mapping):
            if part.get("type") == "text":  # other parts are refused as a whole
                ignored.check(part, PART_FIELDS, f"{where}.content.{number}")
            if part.get(BREAKPOINT) is not None:
                found.append(_lifetime(part[BREAKPOINT], f"{where}.content.{number}.{BREAKPOINT}", ignored))
            part = {name: value for name, value in part.items() if name != BREAKPOINT}
        parts.append(part)
    return parts, found


def _lifetime(given: Any, where: str, ignored: IgnoredFields) -> float:
    values = ignored.check(given, ("mode", "ttl"), where) if isinstance(given, Mapping) else {"mode": given}
    wanted = {"mode": "explicit", "ttl": DEFAULT_LIFETIME} | {k: v for k, v in values.items() if v is not None}
    ttl = wanted["ttl"]
    if wanted["mode"] != "explicit" or not isinstance(ttl, str) or ttl not in LIFETIMES:
        known = ", ".join(LIFETIMES)
        raise invalid_field(where, f"must have mode explicit and a ttl of {known}")
    return LIFETIMES[ttl]
