"""Represent a chat as a tree of exchanges, each built from an agent's events, and run the agent in the background.

root -- "What is 2 + 2?" -- "And 3 + 3?"      an edited question is a sibling: the same conversation before it,
                         \\- "And 4 + 4?"      so its prompt begins with the same cached tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from workbench.agents.agent import Agent
from workbench.agents.rounds import AgentRun
from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import AssistantTurn, ResultTurn, UserTurn
from workbench.trace.agent_events import (
    AgentEvent,
    AgentFinished,
    AnswerPiece,
    CallFinished,
    CallStarted,
    RoundFinished,
    RoundStarted,
)
from workbench.widgets.job import Job

NO_RESULT = "error: there is no result"  # result of a call to a tool without a function


@dataclass(eq=False)
class ChatPart:
    """A part of an answer: a thought, a text or a call. `pieces` are its streamed text; for a call, its JSON.

    `name` is empty until the call is complete, and `result` is None until the call has returned.
    """

    kind: str
    round: int
    index: int = 0
    pieces: list[str] = field(default_factory=list)
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str | None = None
    error: str = ""
    printed: str = ""
    seconds: float = 0.0
    is_complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(eq=False)
class Exchange:
    """A question and its answer. `base` is the conversation before the question. `conversation` is the one after the
    answer, None while the model answers, and also if it gave no answer."""

    number: int
    question: str
    base: Conversation = field(repr=False)
    parent: Exchange | None = field(default=None, repr=False)
    parts: list[ChatPart] = field(default_factory=list)
    rounds: list[RoundFinished] = field(default_factory=list)
    prompt_tokens: int = 0  # of the present round
    running: bool = False
    stop_reason: str = ""
    error: str = ""
    conversation: Conversation | None = field(default=None, repr=False)
    children: list[Exchange] = field(default_factory=list, repr=False)
    selected: int = 0

    @property
    def going_on(self) -> Conversation:
        """Return the conversation to which the next question is added."""
        return self.base if self.conversation is None else self.conversation

    @property
    def branch(self) -> tuple[int, int]:
        """Return the index of this exchange among the branches at its place in the chat, and the number of these
        branches."""
        siblings = self.parent.children if self.parent is not None else [self]
        return siblings.index(self), len(siblings)

    def add_event(self, event: AgentEvent) -> None:
        match event:
            case RoundStarted():
                self.prompt_tokens = event.prompt_tokens
            case AnswerPiece():
                self._part(event.channel, event.round, event.index).pieces.append(event.text)
            case CallStarted():
                self._complete_all()
                part = self._part("call", event.round, event.index)
                part.name, part.arguments, part.is_complete = event.name, event.arguments, True
            case CallFinished():
                part = self._part("call", event.round, event.index)
                part.result, part.error, part.seconds = event.result, event.error, event.seconds
                part.name, part.printed = event.name, event.printed
            case RoundFinished():
                self.rounds.append(event)
                self._complete_all()
            case AgentFinished():
                self.stop_reason, self.error = event.stop_reason, event.error
                found = event.result.conversation
                # Drop a question without an answer, so that the next prompt does not hold two questions in a row.
                self.conversation = None if isinstance(found.turns[-1], UserTurn) else found

    def _part(self, kind: str, round: int, index: int) -> ChatPart:
        for part in reversed(self.parts):
            if part.kind == kind == "call" and (part.round, part.index) == (round, index):
                return part
        last = self.parts[-1] if self.parts else None
        if kind == "call" or last is None or (last.kind, last.round) != (kind, round):
            self._complete_all()
            self.parts.append(last := ChatPart(kind, round, index))
        return last

    def _complete_all(self) -> None:
        for part in self.parts:
            part.is_complete = part.is_complete or part.kind != "call"


class ChatTree:
    """The exchanges of a chat as a tree. `path` returns the shown branch, from the first exchange to the last."""

    def __init__(self, conversation: Conversation):
        first = next((n for n, turn in enumerate(conversation.turns) if isinstance(turn, UserTurn)), None)
        before = conversation.turns if first is None else conversation.turns[:first]
        self.root = Exchange(0, "", conversation.model_copy(update={"turns": before}))
        self.exchanges: dict[int, Exchange] = {}
        for question, turns in _exchanges_of(conversation):
            self._add_answered(question, turns)

    def path(self) -> list[Exchange]:
        return list(self._walk())

    @property
    def last(self) -> Exchange:
        path = self.path()
        return path[-1] if path else self.root

    @property
    def conversation(self) -> Conversation:
        """Return the conversation of the shown branch."""
        return self.last.going_on

    def add(self, question: str, parent: Exchange | None = None) -> Exchange:
        """Add a question after `parent` (default: the last exchange), and show its branch."""
        parent = self.last if parent is None else parent
        made = Exchange(len(self.exchanges) + 1, question, parent.going_on, parent)
        parent.children.append(made)
        parent.selected = len(parent.children) - 1
        self.exchanges[made.number] = made
        return made

    def get(self, number: int) -> Exchange:
        if number not in self.exchanges:
            raise WorkbenchError(f"Chat: there is no message {number}; there are 1 to {len(self.exchanges)}")
        return self.exchanges[number]

    def select(self, number: int, branch: int) -> None:
        """Show another branch: the sibling of exchange `number` that has the index `branch`."""
        parent = self.get(number).parent
        if parent is not None and 0 <= branch < len(parent.children):
            parent.selected = branch

    def _walk(self) -> Iterator[Exchange]:
        at = self.root
        while at.children:
            yield (at := at.children[at.selected])

    def _add_answered(self, question: str, turns: list[Any]) -> None:
        made = self.add(question)
        talk = made.base.user(question)
        round = -1
        for turn in turns:
            talk = talk.with_turn(turn)
            if isinstance(turn, AssistantTurn):
                round += 1
                made.parts += [ChatPart("thought", round, 0, [turn.thinking])] if turn.thinking else []
                made.parts += [ChatPart("text", round, 0, [turn.content])] if turn.content else []
                made.parts += [
                    ChatPart("call", round, n, [], call.name, call.arguments) for n, call in enumerate(turn.tool_calls)
                ]
            elif isinstance(turn, ResultTurn):
                waiting = (each for each in made.parts if each.kind == "call" and each.result is None)
                if (part := next(waiting, None)) is not None:
                    part.result = turn.content
        made._complete_all()
        made.conversation = talk if turns else None


def _exchanges_of(conversation: Conversation) -> list[tuple[str, list[Any]]]:
    """Return the questions of a conversation, each with the turns up to the next question."""
    found: list[tuple[str, list[Any]]] = []
    for turn in conversation.turns:
        if isinstance(turn, UserTurn):
            found.append((turn.content, []))
        elif found:
            found[-1][1].append(turn)
    return found


def answer_in_background(
    agent: Agent,
    conversation: Conversation,
    on_event: Callable[[AgentEvent], None],
    on_end: Callable[[str], None],
) -> Job:
    """Start an agent's run: `on_event` is called with each event, `on_end` once at the end, with an error or "".

    Stopping the job ends the run within a step or two of the runner, or at once if the run waits for a tool.
    """
    runs: list[AgentRun] = []

    def work(job: Job) -> None:
        runs.append(agent.stream(conversation))
        if job.stopped:
            runs[0].stop()
        for event in runs[0]:
            on_event(event)

    return Job(work, lambda job: on_end(job.error), lambda: [run.stop() for run in runs], "chat").start()
