"""Moderate prompts and answers by terms, regular expressions, and a user-defined classifier.

No character of a rule's match is ever sent to the client. A classifier sees windows of a text before it is sent. It
runs in a thread outside of the event loop; if it fails or is late, `on_failure` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.custom import load_custom
from workbench.errors import describe_error
from workbench.gateway.streamed_rules import RulePattern, StreamedText
from workbench.gateway.work_threads import OnFailure, WorkThreads
from workbench.request import CustomPart
from workbench.serve.answers.pieces import Ended, Failed, Piece, Text, Thought, ToolArguments, Used
from workbench.settings import Count, Settings

LOG = logging.getLogger(__name__)
Direction = Literal["input", "output"]
BOTH: tuple[Direction, ...] = ("input", "output")
MAX_CHECKED = 8_192  # last characters of an answer in the classifier's window


class ModerationRule(Settings):
    """Forbidden terms (case-insensitive) and a forbidden regular expression."""

    name: str
    terms: tuple[Annotated[str, Field(min_length=1, max_length=1_000)], ...] = ()
    whole_words: bool = True  # "cat" does not forbid "category"
    regex: Annotated[str, Field(min_length=1)] | None = None  # syntax of the library `regex`, without look-around
    on: tuple[Direction, ...] = BOTH

    @model_validator(mode="after")
    def _some(self) -> ModerationRule:
        if not self.terms and self.regex is None:
            raise ValueError(f"rule {self.name!r} has neither terms nor a regex: give one")
        return self


class ModerationConfig(Settings):
    """Rules for prompts and answers."""

    rules: tuple[ModerationRule, ...] = ()
    classifier: CustomPart | None = None  # function: text -> name of the finding, or an empty string
    classifier_on: tuple[Direction, ...] = BOTH
    seconds: Annotated[float, Field(gt=0)] = 5.0  # time limit of a call of the classifier
    on_failure: OnFailure = "closed"  # on a failure or timeout: refuse the prompt or stop the answer, or let it pass
    window_characters: Count = 200  # characters held back until the classifier has seen them
    max_match_characters: Count = 256  # maximum characters held back for a regex; longer matches are found late


class CheckFailed(Exception):
    """Raised if the classifier failed, or did not return in time."""


class Moderation:
    """Compiled moderation rules.

    Raises:
        WorkbenchError: if a regular expression or user-defined part cannot be used.
    """

    def __init__(self, config: ModerationConfig):
        self.config = config
        self._rules = {way: _rules_on(config, way) for way in BOTH}
        self._classify = None if config.classifier is None else load_custom(config.classifier)
        self._threads = WorkThreads()

    def moderates(self, way: Direction) -> bool:
        return bool(self._rules[way]) or self.classifies(way)

    def classifies(self, way: Direction) -> bool:
        return self._classify is not None and way in self.config.classifier_on

    async def find_in_prompt(self, texts: Sequence[str]) -> str:
        """Return the name of the first rule that a text violates; empty if none is violated.

        Raises:
            CheckFailed: the classifier failed, and `on_failure` is closed.
        """
        if found := await self._threads.run(lambda: self._rule_of(texts)):
            return found
        for text in texts if self.classifies("input") else ():
            if found := await self.check("input", text):
                return found
        return ""

    def _rule_of(self, texts: Sequence[str]) -> str:
        matches = (self.streamed("input").feed(text, is_all=True)[1] for text in texts)
        return next((match.rule for match in matches if match is not None), "")

    def answer_filter(self, num_choices: int) -> AnswerFilter:
        return AnswerFilter(self, num_choices)

    def streamed(self, way: Direction) -> StreamedText:
        return StreamedText(self._rules[way])

    async def check(self, way: Direction, text: str) -> str:
        """Return what the classifier finds in a text, or an empty string; may raise CheckFailed."""
        classify = self._classify
        assert classify is not None
        try:
            return await self._threads.run(lambda: str(classify(text) or ""), self.config.seconds)
        except Exception as error:
            LOG.error("moderation of an %s failed, and is %s: %s", way, self.config.on_failure, error)
            if self.config.on_failure == "closed":
                raise CheckFailed(describe_error(error)) from error
            return ""


@dataclass
class _Channel:
    """One channel of a choice: its text, and the numbers of characters that were classified and sent."""

    text: StreamedText
    checked: int = 0
    left: int = 0


@dataclass
class _Choice:
    channels: dict[tuple[type, int], _Channel] = field(default_factory=dict)
    current: tuple[type, int] | None = None
    held: list[Text | Thought | ToolArguments] = field(default_factory=list)  # held pieces of the current channel
    ended: bool = False


class AnswerFilter:
    """A filter that releases the pieces of one answer once no rule can match them any more.

    Attributes:
        stopped_by: the rule that stopped the answer; empty if it was not stopped.
    """

    def __init__(self, moderation: Moderation, num_choices: int):
        self._moderation = moderation
        self._choices = {number: _Choice() for number in range(num_choices)}
        self.stopped_by = ""

    async def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces that may be sent now. After a match every choice ends with content_filter."""
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
        channel = choice.channels.setdefault(choice.current, _Channel(self._moderation.streamed("output")))
        released, match = channel.text.feed(text, is_all)
        stopped_by = "" if match is None else match.rule
        if self._moderation.classifies("output"):
            fresh = channel.text.length - channel.checked
            if fresh and (is_all or fresh >= self._moderation.config.window_characters):
                try:
                    found = await self._moderation.check("output", channel.text.text[-MAX_CHECKED:])
                except CheckFailed as error:
                    found = f"a check that failed ({error})"
                stopped_by = stopped_by or found
                channel.checked = channel.checked if found else channel.text.length
            released = min(released, channel.checked)
        out: list[Piece] = _release(channel, choice.held, released, is_all and not stopped_by)
        if stopped_by:
            self.stopped_by = stopped_by
            for number, each in self._choices.items():
                if not each.ended:
                    each.ended = True
                    out.append(Ended(number, "content_filter"))
        return out


def _release(channel: _Channel, held: list[Text | Thought | ToolArguments], until: int, is_all: bool) -> list[Piece]:
    """Release the held pieces up to a position. A piece's tokens are sent with its last character."""
    out: list[Piece] = []
    while held and (is_all or channel.left + len(held[0].text) <= until):
        piece = held.pop(0)
        channel.left += len(piece.text)
        out.append(piece)
    if held and (size := until - channel.left) > 0:
        piece = held[0]
        bare = {} if isinstance(piece, ToolArguments) else {"token_ids": ()}
        bare |= {"logprobs": ()} if isinstance(piece, Text) else {}
        out.append(replace(piece, text=piece.text[:size], **bare))
        held[0] = replace(piece, text=piece.text[size:])
        channel.left = until
    return out


def _channel_of(piece: Piece) -> tuple[type, int]:
    return type(piece), piece.index if isinstance(piece, ToolArguments) else 0


def _rules_on(config: ModerationConfig, way: Direction) -> list[RulePattern]:
    rules = [each for each in config.rules if way in each.on]
    patterns = [RulePattern.of_terms(each.name, each.terms, each.whole_words) for each in rules if each.terms]
    most = config.max_match_characters
    return patterns + [RulePattern.of_regex(each.name, each.regex, most) for each in rules if each.regex]
