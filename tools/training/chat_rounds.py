"""Run many conversations with demo-chat in step: greedy decoding, a budget for thoughts, and tool calls until the model
answers.

The library's parts do it all: a conversation's prompt, the engine's thinking budget, the parser of answers, the grammar
of replies and the tools' calls, as its agent puts them together for one conversation. Only counting is done here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.chat_exchanges import Call
from workbench.agents.agent import Agent
from workbench.agents.arguments import find_fault
from workbench.agents.calls import call_tool, unknown_tool
from workbench.engine.runner import Runner, generate
from workbench.prompt.answers import AnswerFormat, parse_answer
from workbench.prompt.conversation import Conversation
from workbench.prompt.own_template import TURN
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import Tool
from workbench.request import Request, SamplingParameters
from workbench.response_format import Thinking

MAX_ROUNDS = 5
MAX_ANSWER = 160  # tokens of a reply after its thought


@dataclass
class Reply:
    """The calls of each round and the answer that the model wrote in one exchange, and the number of format breaks by
    kind.

    Calls that break the format are in no round.
    """

    rounds: list[list[Call]] = field(default_factory=list)
    answer: str = ""
    violations: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    thought_tokens: int = 0
    thoughts: list[str] = field(default_factory=list)


@dataclass
class Chat:
    """A conversation with an agent, and the reply that it is writing."""

    agent: Agent
    talk: Conversation
    constrained: bool
    reply: Reply = field(default_factory=Reply)
    done: bool = False


def start(
    runner: Runner, system: str, tools: Sequence[Callable[..., Any]], budget: int = 0, constrained: bool = False
) -> Chat:
    """Begin a conversation whose thoughts have at most `budget` tokens (0: no thoughts). With `constrained`, replies
    follow the grammar, as an agent's do; otherwise the model is free to break the format."""
    thinking = Thinking(budget_tokens=budget) if budget else None
    made = Agent(runner, tools, system or None, temperature=0, max_tokens=MAX_ANSWER, thinking=thinking)
    talk = Conversation(system=system or None, tools=made.tools, template_arguments={"enable_thinking": budget > 0})
    return Chat(made, talk, constrained)


def ask(runner: Runner, chats: Sequence[Chat], questions: Sequence[str]) -> None:
    """Ask each chat one question, and run all chats in step until each has answered, so that they share the engine's
    batches."""
    for chat, question in zip(chats, questions, strict=True):
        chat.talk = chat.talk.user(question)
        chat.reply, chat.done = Reply(), False
    for _ in range(MAX_ROUNDS):
        waiting = [chat for chat in chats if not chat.done]
        requests = [_request(runner, chat, str(number)) for number, chat in enumerate(waiting)]
        for chat, request, ids in zip(waiting, requests, _continue(runner, requests), strict=True):
            _take(runner, chat, request, ids)
    for chat in chats:
        if not chat.done:
            chat.reply.violations["no answer in so many rounds"] += 1


def _request(runner: Runner, chat: Chat, name: str) -> Request:
    prompt = chat.talk.prompt(runner)
    values = chat.agent.sampling_of(chat.talk, chat.agent.answer_format(chat.agent.tools), None)
    values |= {"stop_token_ids": prompt.end_token_ids} | ({} if chat.constrained else {"response_format": None})
    return Request(name, prompt.ids, SamplingParameters(**values))


def _continue(runner: Runner, requests: Sequence[Request]) -> list[list[int]]:
    """Return what greedy decoding appends to each prompt."""
    finished = generate(runner, requests)
    return [list(finished[request.request_id].token_ids) for request in requests]


def _take(runner: Runner, chat: Chat, request: Request, ids: list[int]) -> None:
    """Read a reply, run its calls, and put their results behind it; without calls it is the answer."""
    assert runner.tokenizer is not None
    format = chat.agent.answer_format(chat.agent.tools)
    in_thought = format.ends_in_thought(request.prompt_ids)
    turn = parse_answer(ids, runner.tokenizer, format, in_thought, request.prompt_ids)
    reply = chat.reply
    chat.talk = chat.talk.with_turn(turn)
    written = split_reply(ids, runner.tokenizer, format, in_thought)
    reply.violations += written.violations(chat.talk.tools)
    reply.tokens += len(ids) - len(written.thought)
    reply.thought_tokens += len(written.thought)
    if in_thought:
        reply.thoughts.append(turn.thinking or "")
    if not turn.tool_calls:
        reply.answer, chat.done = str(turn.content), True
        return
    reply.rounds.append(written.right_calls(chat.talk.tools))
    for call in turn.tool_calls:
        tool = next((each for each in chat.talk.tools if each.name == call.name), None)
        most = chat.agent.limits.result_characters
        found = unknown_tool(call.name, chat.talk.tools) if tool is None else call_tool(tool, call, most)
        chat.talk = chat.talk.result(found.result, call)


@dataclass(frozen=True)
class Written:
    """The parts that a model wrote in one turn, split at control tokens: a thought, a text and calls, and the number of
    misplaced control tokens."""

    thought: list[int]
    text: str
    calls: list[str]
    is_ended: bool
    misplaced: int  # parts with a control token in them

    def violations(self, tools: Sequence[Tool]) -> Counter[str]:
        """Return the number of format breaks in the turn, by kind."""
        found = Counter(fault for call in self.calls if (fault := _fault(call, tools)))
        found["control token out of place"] = self.misplaced
        found["turn not ended"] = not self.is_ended
        found["text beside a call"] = bool(self.calls and self.text)
        found["nothing said"] = not self.calls and not self.text
        return +found

    def right_calls(self, tools: Sequence[Tool]) -> list[Call]:
        """Return the calls that match the declaration of their tool."""
        values = [json.loads(call) for call in self.calls if not _fault(call, tools)]
        return [Call(each["name"], each["arguments"]) for each in values]


def split_reply(ids: Sequence[int], tokenizer: Tokenizer, format: AnswerFormat, in_thought: bool) -> Written:
    """Split a reply at its control tokens; `in_thought` means that the prompt has already opened the thought."""
    rest, thought = list(ids), list[int]()
    is_ended = rest[-1:] == [tokenizer.special_token_ids[TURN]]
    if is_ended:
        rest.pop()
    if in_thought and format.thought is not None:
        end = rest.index(format.thought[1]) if format.thought[1] in rest else len(rest)
        thought, rest = rest[:end], rest[end + 1 :]
    parts: list[list[int]] = [[]]
    for id in rest:
        if format.call is not None and id == format.call[0]:
            parts.append([])
        else:
            parts[-1].append(id)
    misplaced = sum(any(map(tokenizer.is_special, part)) for part in (thought, *parts))
    text, *calls = map(tokenizer.decode, parts)
    return Written(thought, text, calls, is_ended, misplaced)


def _fault(text: str, tools: Sequence[Tool]) -> str:
    """Return what is wrong with a call; nothing if it keeps its tool's declaration."""
    try:
        value = json.loads(text)
        name, arguments = value["name"], value["arguments"]
        named = len(value) == 2 and isinstance(name, str)
    except (ValueError, LookupError, TypeError):
        return "call is no JSON of a call"
    schemas = {each.name: each.parameters for each in tools}
    if not named or name not in schemas:
        return "call of an unknown tool"
    return "arguments against the declaration" if find_fault(arguments, schemas[name]) else ""
