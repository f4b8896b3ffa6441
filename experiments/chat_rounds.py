"""Converse with demo-chat through the engine: greedy, with thoughts of a budget, tools run until there is an answer.

The smallest loop that judges the model; the library's agent replaces it once it is there (issue 17, part 3). A prompt
is kept as ids: what the model wrote is continued as it was written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.chat_exchanges import Call
from experiments.chat_format import ASSISTANT, END_THINK, THINK, TOOL, TURN, USER, Segment, segments
from workbench.engine.runner import Runner, generate
from workbench.request import Request, SamplingParameters

MAX_ROUNDS = 5
MAX_ANSWER = 160  # tokens of a reply after its thought
TYPES: dict[str, type | tuple[type, ...]] = {"string": str, "number": (int, float)}


@dataclass
class Reply:
    """Rounds of calls and the answer that the model wrote in one exchange, and how often it broke the format."""

    rounds: list[list[Call]] = field(default_factory=list)
    answer: str = ""
    violations: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    thought_tokens: int = 0
    thoughts: list[str] = field(default_factory=list)


@dataclass
class Chat:
    """A conversation under way: the ids so far, up to where the assistant begins, and the reply in progress."""

    ids: list[int]
    declarations: Sequence[dict[str, Any]]
    reply: Reply = field(default_factory=Reply)
    done: bool = False


def start(runner: Runner, system: str, declarations: Sequence[dict[str, Any]]) -> Chat:
    messages = [{"role": "system", "content": system}] if system else []
    return Chat(_ids(runner, segments(messages, declarations)), declarations)


def ask(runner: Runner, chats: Sequence[Chat], questions: Sequence[str], budget: int, grammar: bool = False) -> None:
    """Answer one question in each chat: all chats in step, so that they share the engine's batches."""
    for chat, question in zip(chats, questions, strict=True):
        chat.ids += _ids(runner, [(USER, True, False), (question, False, False), (TURN, True, False)])
        chat.reply, chat.done = Reply(), False
    for _ in range(MAX_ROUNDS):
        waiting = [chat for chat in chats if not chat.done]
        for chat in waiting:
            chat.ids += _ids(runner, [(ASSISTANT, True, False)])
        if budget:
            _think(runner, waiting, budget)
        written = _continue(runner, waiting, MAX_ANSWER, TURN, grammar)
        for chat, ids in zip(waiting, written, strict=True):
            _take(runner, chat, ids)
    for chat in chats:
        if not chat.done:
            chat.reply.violations["no answer in so many rounds"] += 1


def _think(runner: Runner, chats: Sequence[Chat], budget: int) -> None:
    """Open a thought, and close it by force at the budget (the engine's own budget replaces this: issue 17, part 4)."""
    for chat in chats:
        chat.ids += _ids(runner, [(THINK, True, False)])
    close = _ids(runner, [(END_THINK, True, False)])
    for chat, ids in zip(chats, _continue(runner, chats, budget, END_THINK), strict=True):
        thought = ids[:-1] if ids[-1:] == close else ids
        chat.reply.thoughts.append(_text(runner, thought))
        chat.reply.thought_tokens += len(thought)
        _count_controls(runner, chat.reply, thought)
        chat.ids += thought + close


def _continue(
    runner: Runner, chats: Sequence[Chat], max_tokens: int, stop: str, grammar: bool = False
) -> list[list[int]]:
    """Return what greedy decoding appends to each chat, up to and with the token `stop`, if it comes."""
    stops = tuple(_ids(runner, [(stop, True, False)]))
    requests = []
    for number, chat in enumerate(chats):
        constraint = {"response_format": {"kind": "lark", "lark": reply_grammar(chat.declarations)}} if grammar else {}
        sampling = SamplingParameters.model_validate(
            {"temperature": 0, "max_tokens": max_tokens, "stop_token_ids": stops, **constraint}
        )
        requests.append(Request(str(number), tuple(chat.ids), sampling))
    finished = generate(runner, requests)
    return [list(finished[request.request_id].token_ids) for request in requests]


def reply_grammar(declarations: Sequence[dict[str, Any]]) -> str:
    """Return a reply's grammar (Lark): text without control tokens, or calls that keep their tools' declarations."""
    if not declarations:
        return "start: text\ntext: /(.|\\n)+/"
    options = [
        {"type": "object", "properties": {"name": {"const": tool["name"]}, "arguments": tool["parameters"]},
         "required": ["name", "arguments"], "additionalProperties": False}
        for tool in (each["function"] for each in declarations)
    ]  # fmt: skip
    call = f"call: {TOOL} %json {json.dumps({'anyOf': options})}"
    return f"start: text | call+\ntext: /(.|\\n)+/\n{call}"


def _take(runner: Runner, chat: Chat, ids: list[int]) -> None:
    """Read a reply, run its calls, and put their results behind it; without calls it is the answer."""
    reply, turn = chat.reply, _ids(runner, [(TURN, True, False)])
    reply.tokens += len(ids)
    if ids[-1:] == turn:
        ids = ids[:-1]
    else:
        reply.violations["turn not ended"] += 1
    chat.ids += ids + turn
    call_id = _ids(runner, [(TOOL, True, False)])[0]
    parts: list[list[int]] = [[]]
    for id in ids:
        if id == call_id:
            parts.append([])
        else:
            parts[-1].append(id)
    text = _text(runner, parts[0])
    for part in parts:
        _count_controls(runner, reply, part)
    calls = [call for part in parts[1:] if (call := _parse(_text(runner, part), chat.declarations, reply)) is not None]
    if parts[1:] and text:
        reply.violations["text beside a call"] += 1
    if not parts[1:] and not text:
        reply.violations["nothing said"] += 1
    if parts[1:]:
        reply.rounds.append(calls)
        results = [(TOOL, call.result) for call in calls] or [(TOOL, "error: the call could not be read")]
        for name, result in results:
            chat.ids += _ids(runner, [(name, True, False), (result, False, False), (TURN, True, False)])
    else:
        reply.answer, chat.done = text, True


def _parse(text: str, declarations: Sequence[dict[str, Any]], reply: Reply) -> Call | None:
    """Return a call that keeps its tool's declaration; count what is wrong with another."""
    try:
        value = json.loads(text)
        name, arguments = value["name"], value["arguments"]
        named = len(value) == 2 and isinstance(name, str)
    except (ValueError, LookupError, TypeError):
        reply.violations["call is no JSON of a call"] += 1
        return None
    parameters = {each["function"]["name"]: each["function"]["parameters"] for each in declarations}
    if not named or name not in parameters:
        reply.violations["call of an unknown tool"] += 1
        return None
    if not fits(arguments, parameters[name]["properties"]):
        reply.violations["arguments against the declaration"] += 1
        return None
    return Call(name, arguments)


def fits(arguments: Any, properties: dict[str, dict[str, str]]) -> bool:
    """Return whether arguments have every property of a declaration, each of its type, and no other."""
    if not isinstance(arguments, dict) or arguments.keys() != properties.keys():
        return False
    kinds = {name: TYPES[properties[name]["type"]] for name in properties}
    return all(isinstance(value, kinds[name]) and not isinstance(value, bool) for name, value in arguments.items())


def _count_controls(runner: Runner, reply: Reply, ids: Iterable[int]) -> None:
    assert runner.tokenizer is not None
    if any(map(runner.tokenizer.is_special, ids)):
        reply.violations["control token out of place"] += 1


def _text(runner: Runner, ids: list[int]) -> str:
    assert runner.tokenizer is not None
    return runner.tokenizer.decode(ids)


def _ids(runner: Runner, parts: Iterable[Segment]) -> list[int]:
    """Return ids of segments by the model's own tokenizer; texts never make a control token."""
    assert runner.tokenizer is not None
    found: list[int] = []
    for text, control, _ in parts:
        found += [runner.tokenizer.special_token_ids[text]] if control else runner.tokenizer.encode(text)
    return found
