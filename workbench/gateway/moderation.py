"""Moderate what goes in and what comes out: terms, regular expressions, topics, and a classifier as a user part.

Of an answer's text that leaves, no character belongs to a match of a rule. A classifier and topics see a text before it
leaves, in windows. They run beside the event loop; where one fails or does not return in time, `on_failure` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.custom import load_custom
from workbench.errors import WorkbenchError, describe_error
from workbench.gateway.similarity import cosine, unit
from workbench.gateway.streamed_rules import BoundedPattern, StreamedText, TermAutomaton
from workbench.gateway.work_threads import OnFailure, WorkThreads
from workbench.request import CustomPart
from workbench.serve.answers.pieces import Ended, Failed, Piece, Text, Thought, ToolArguments, Used
from workbench.settings import Count, Settings

LOG = logging.getLogger(__name__)
Direction = Literal["input", "output"]
BOTH: tuple[Direction, ...] = ("input", "output")
Check = Callable[[str], str]  # returns the name of what it found; an empty text for nothing
MAX_CHECKED = 8_192  # characters of an answer's end that a classifier sees


class ModerationRule(Settings):
    """Terms, without regard to case, and a regular expression that texts must not have."""

    name: str
    terms: tuple[Annotated[str, Field(min_length=1, max_length=1_000)], ...] = ()
    whole_words: bool = True  # "cat" does not forbid "category"
    regex: Annotated[str, Field(min_length=1)] | None = None  # of Python's `re`, without look-around
    on: tuple[Direction, ...] = BOTH

    @model_validator(mode="after")
    def _some(self) -> ModerationRule:
        if not self.terms and self.regex is None:
            raise ValueError(f"rule {self.name!r} has neither terms nor a regex: give one")
        return self


class Topic(Settings):
    """A topic by examples: a text is about it if its embedding is near to that of one."""

    name: str
    examples: Annotated[tuple[str, ...], Field(min_length=1)]
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8  # cosine
    on: tuple[Direction, ...] = ("input",)


class ModerationConfig(Settings):
    """Rules for prompts and answers."""

    rules: tuple[ModerationRule, ...] = ()
    topics: tuple[Topic, ...] = ()
    embedding: CustomPart | None = None  # a function: texts -> a vector of each
    classifier: CustomPart | None = None  # a function: a text -> the name of what it found, or an empty text
    classifier_on: tuple[Direction, ...] = BOTH
    seconds: Annotated[float, Field(gt=0)] = 5.0  # for a classifier or the embedding, each time
    on_failure: OnFailure = "closed"  # where one fails or is late: refuse the prompt or stop the answer, or let it pass
    window_characters: Count = 200  # that are held back until a classifier or topic has seen them
    max_match_characters: Count = 256  # of a regex without a longest match: longer ones may be found late

    @model_validator(mode="after")
    def _embedded(self) -> ModerationConfig:
        if self.topics and self.embedding is None:
            raise ValueError("topics are compared by an embedding: give one, a function from texts to vectors")
        return self


class CheckFailed(Exception):
    """A classifier or the embedding of topics failed, or did not return in time."""


class Moderation:
    """Rules, ready to be applied.

    Raises:
        WorkbenchError: where a regular expression or user part cannot be used.
    """

    def __init__(self, config: ModerationConfig):
        self.config = config
        self._rules = {way: _rules_on(config, way) for way in BOTH}
        self._checks = {way: _checks_on(config, way) for way in BOTH}
        self._threads = WorkThreads()

    def moderates(self, way: Direction) -> bool:
        automata, patterns = self._rules[way]
        return bool(automata or patterns or self._checks[way])

    async def find_in_prompt(self, texts: Sequence[str]) -> str:
        """Return the name of the first rule that one of the texts breaks; empty where none does.

        Raises:
            CheckFailed: a classifier or the embedding failed, and `on_failure` is closed.
        """
        if found := await self._threads.run(lambda: self._rule_of(texts)):
            return found
        for text in texts if self._checks["input"] else ():
            if found := await self._check("input", text):
                return found
        return ""

    def _rule_of(self, texts: Sequence[str]) -> str:
        matches = (self.streamed("input").feed(text, is_all=True)[1] for text in texts)
        return next((match.rule for match in matches if match is not None), "")

    def answer_filter(self, num_choices: int) -> AnswerFilter:
        return AnswerFilter(self, num_choices)

    def streamed(self, way: Direction) -> StreamedText:
        return StreamedText(*self._rules[way])

    async def check_answer(self, text: str) -> str:
        """Return what a classifier or topic finds in an answer; empty for nothing (CheckFailed)."""
        return await self._check("output", text)

    async def _check(self, way: Direction, text: str) -> str:
        for check in self._checks[way]:
            try:
                found = await self._threads.run(lambda check=check: check(text), self.config.seconds)
            except Exception as error:
                LOG.error("moderation of an %s failed, and is %s: %s", way, self.config.on_failure, error)
                if self.config.on_failure == "closed":
                    raise CheckFailed(describe_error(error)) from error
            else:
                if found:
                    return found
        return ""

    @property
    def checks_answers(self) -> bool:
        return bool(self._checks["output"])


@dataclass
class _Channel:
    """One channel of a choice: its text, and how far a classifier has seen it."""

    text: StreamedText
    checked: int = 0


@dataclass
class _Choice:
    channels: dict[tuple[type, int], _Channel] = field(default_factory=dict)
    current: tuple[type, int] | None = None
    held: list[Text | Thought | ToolArguments] = field(default_factory=list)  # of the current channel
    left: dict[tuple[type, int], int] = field(default_factory=dict)  # characters that have left, by channel
    ended: bool = False


class AnswerFilter:
    """Let out the pieces of one answer as far as no rule may match them any more.

    Attributes:
        stopped_by: the rule that stopped the answer; empty if none did.
    """

    def __init__(self, moderation: Moderation, num_choices: int):
        self._moderation = moderation
        self._choices = {number: _Choice() for number in range(num_choices)}
        self.stopped_by = ""

    async def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that may leave now. After a match every choice ends with content_filter."""
        out: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Used | Failed):
                out.append(piece)
            elif not self._choices[piece.choice].ended:
                out += await self._take(piece, self._choices[piece.choice])
        return out

    async def _take(self, piece: Piece, choice: _Choice) -> list[Piece]:
        out: list[Piece] = []
        is_text = isinstance(piece, Text | Thought | ToolArguments)
        name = _channel_of(piece) if is_text else None
        if name != choice.current:
            out += await self._feed(choice, "", is_all=True)
            choice.current = None if choice.ended else name
        if choice.ended:
            return out
        if isinstance(piece, Text | Thought | ToolArguments):
            choice.held.append(piece)
            return out + await self._feed(choice, piece.text, is_all=False)
        choice.ended = isinstance(piece, Ended)
        return [*out, piece]

    async def _feed(self, choice: _Choice, text: str, is_all: bool) -> list[Piece]:
        if choice.current is None:
            return []
        channel = choice.channels.get(choice.current)
        if channel is None:
            channel = choice.channels[choice.current] = _Channel(self._moderation.streamed("output"))
        released, match = channel.text.feed(text, is_all)
        stopped_by = "" if match is None else match.rule
        if self._moderation.checks_answers:
            fresh = channel.text.length - channel.checked
            if fresh and (is_all or fresh >= self._moderation.config.window_characters):
                try:
                    found = await self._moderation.check_answer(channel.text.text[-MAX_CHECKED:])
                except CheckFailed as error:
                    found = f"a check that failed ({error})"
                stopped_by = stopped_by or found
                channel.checked = channel.checked if found else channel.text.length
            released = min(released, channel.checked)
        out: list[Piece] = _release(choice, released, is_all and not stopped_by)
        if stopped_by:
            self.stopped_by = stopped_by
            for number, each in self._choices.items():
                if not each.ended:
                    each.ended = True
                    out.append(Ended(number, "content_filter"))
        return out


def _release(choice: _Choice, until: int, is_all: bool) -> list[Piece]:
    """Return the held pieces up to a position. A piece's tokens leave with its last character."""
    out: list[Piece] = []
    assert choice.current is not None
    place = choice.left.get(choice.current, 0)
    while choice.held:
        piece = choice.held[0]
        room = until - place
        if len(piece.text) <= room or is_all:
            out.append(choice.held.pop(0))
            place += len(piece.text)
            continue
        if room > 0:
            bare = {} if isinstance(piece, ToolArguments) else {"token_ids": ()}
            bare |= {"logprobs": ()} if isinstance(piece, Text) else {}
            out.append(replace(piece, text=piece.text[:room], **bare))
            choice.held[0] = replace(piece, text=piece.text[room:])
            place += room
        break
    choice.left[choice.current] = place
    return out


def _channel_of(piece: Piece) -> tuple[type, int]:
    return type(piece), piece.index if isinstance(piece, ToolArguments) else 0


def _rules_on(config: ModerationConfig, way: Direction) -> tuple[list[TermAutomaton], list[BoundedPattern]]:
    rules = [each for each in config.rules if way in each.on]
    automata = []
    for whole in (True, False):
        terms = [(rule.name, term) for rule in rules if rule.whole_words == whole for term in rule.terms]
        automata += [TermAutomaton(terms, whole)] if terms else []
    patterns = [
        BoundedPattern.parse(each.name, each.regex, config.max_match_characters) for each in rules if each.regex
    ]
    return automata, patterns


def _checks_on(config: ModerationConfig, way: Direction) -> list[Check]:
    checks: list[Check] = []
    topics = [each for each in config.topics if way in each.on]
    if topics and config.embedding is not None:
        checks.append(TopicCheck(topics, load_custom(config.embedding)))
    if config.classifier is not None and way in config.classifier_on:
        classify = load_custom(config.classifier)
        checks.append(lambda text: str(classify(text) or ""))
    return checks


class TopicCheck:
    """Compare texts with the examples of topics by an embedding."""

    def __init__(self, topics: Sequence[Topic], embed: Callable[[list[str]], Sequence[Sequence[float]]]):
        self._embed = embed
        texts = [(topic, text) for topic in topics for text in topic.examples]
        vectors = embed([text for _, text in texts])
        if len(vectors) != len(texts):
            raise WorkbenchError(
                f"moderation.embedding: {len(vectors)} vectors for {len(texts)} texts; give one of each"
            )
        self._examples = [(topic, unit(vector)) for (topic, _), vector in zip(texts, vectors, strict=True)]

    def __call__(self, text: str) -> str:
        (vector,) = self._embed([text])
        here = unit(vector)
        near = ((cosine(here, each) - topic.threshold, topic.name) for topic, each in self._examples)
        distance, name = max(near)
        return name if distance >= 0 else ""
