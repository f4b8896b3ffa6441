"""Prepare a prompt for drawing: its segments with kinds and cached tokens, under one of several templates.

conversation, template, arguments -> Prompt -> AssembledView: bands, groups of bands, divergence, errors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.prompt.assemble import Divergence, Prompt, Segment
from workbench.prompt.conversation import Conversation
from workbench.prompt.kept_answers import KEPT
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.widgets.tokens.picture import TokenizedPiece

MAX_SEPARATE_BANDS = 80  # prompts with more segments are shown in groups
GROUP_SIZE = 40  # bands in a group
NUM_LAST_BANDS = 24  # last bands, which are never grouped
# Kinds of segments, each with its letter in the picture.
KINDS = {
    "template": "", "system": "S", "tool": "F", "document": "D", "user": "U", "answer": "A", "thought": "T",
    "call": "C", "result": "R", "argument": "V",
}  # fmt: skip
FIELD_KINDS = {"thought": "thought", "calls": "call"}
ROLE_KINDS = {"user": "user", "assistant": "answer", "tool": "result"}


@dataclass(frozen=True)
class Band:
    """One segment of a prompt, with the data for its drawing.

    Args:
        index: index of the segment.
        kind: a key of `KINDS`.
        cached: number of its tokens in the prefix cache.
        note: reason why an answer's tokens were tokenized from text again and not kept as generated; else empty.
        forged: names of control tokens in its text, which are plain characters to the model.
    """

    index: int
    segment: Segment
    kind: str
    cached: int = 0
    note: str = ""
    forged: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.segment.token_ids)


@dataclass(frozen=True)
class BandGroup:
    """Bands that are shown as one row until the group is opened."""

    first: int
    last: int  # exclusive
    num_tokens: int
    cached: int
    turns: tuple[int, int] | None = None  # numbers of the first and last turn in it


@dataclass(frozen=True)
class TemplateOutcome:
    """The prompt that one template makes of a conversation, or the template's error."""

    name: str
    prompt: Prompt | None = None
    divergence: Divergence | None = None
    error: str = ""

    @property
    def written_tokens(self) -> int:
        """Return the number of tokens that come from the template itself, not from the conversation."""
        segments = self.prompt.segments if self.prompt is not None else ()
        return sum(len(each.token_ids) for each in segments if each.name == "template")


@dataclass(frozen=True)
class AssembledView:
    """A prompt with the data for its drawing.

    Args:
        cached_tokens: number of its tokens in the prefix cache; None without such a cache.
        context: most tokens of prompt and answer together; 0 if unknown.
        compared: whether there is a previous prompt.
        divergence: the first difference from the previous prompt; None if that is a prefix of this one.
        error: why the runner would refuse the prompt, or "".
    """

    prompt: Prompt
    tokenizer: Tokenizer
    cached_tokens: int | None = None
    context: int = 0
    compared: bool = False
    divergence: Divergence | None = None
    error: str = ""
    template: str = ""
    outcomes: Sequence[TemplateOutcome] = ()

    @cached_property
    def bands(self) -> tuple[Band, ...]:
        names = tuple(self.tokenizer.special_token_ids)
        return tuple(self._band(index, each, names) for index, each in enumerate(self.prompt.segments))

    def _band(self, index: int, segment: Segment, names: Sequence[str]) -> Band:
        kind, turns = kind_of(segment, self.prompt.conversation), self.prompt.answers
        how = turns.get(segment.turn, KEPT) if segment.turn is not None and kind == "answer" else KEPT
        cached = max(0, min(segment.end, self.cached_tokens or 0) - segment.start)
        own = kind == "template" or is_generated(segment)
        forged = () if own else tuple(name for name in names if name in segment.text)
        return Band(index, segment, kind, cached, "" if how == KEPT else how, forged)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.ids)

    @property
    def written_tokens(self) -> int:
        """Return the number of tokens that come from the template itself, not from the conversation."""
        return sum(each.num_tokens for each in self.bands if each.kind == "template")

    @property
    def num_control_tokens(self) -> int:
        return sum(map(self.tokenizer.is_special, self.prompt.ids))

    @cached_property
    def rows(self) -> tuple[Band | BandGroup, ...]:
        """Return the bands in order; if there are many, the middle ones in groups."""
        bands = self.bands
        if len(bands) <= MAX_SEPARATE_BANDS:
            return bands
        head = next((each.index for each in bands if each.segment.turn is not None), 0)
        head = min(head, GROUP_SIZE)
        last = len(bands) - NUM_LAST_BANDS
        starts = range(head, last, GROUP_SIZE)
        groups = [group(bands[first : min(first + GROUP_SIZE, last)]) for first in starts]
        return (*bands[:head], *groups, *bands[last:])

    def pieces(self, band: Band, first: int = 0, count: int | None = None) -> list[TokenizedPiece]:
        """Return `count` tokens (default: all) of a band from index `first` on."""
        ids = band.segment.token_ids[first : None if count is None else first + count]
        known = self.tokenizer
        return [TokenizedPiece(i, known.token_bytes(i), known.id_to_token(i), known.is_special(i)) for i in ids]

    def containing(self, token: int) -> int:
        """Return the index of the band that contains the token at index `token`; the last band if there is no such
        token."""
        found = (each.index for each in self.bands if each.segment.start <= token < each.segment.end)
        return next(found, len(self.bands) - 1)


def group(bands: Sequence[Band]) -> BandGroup:
    turns = [each.segment.turn for each in bands if each.segment.turn is not None]
    first, last = bands[0].index, bands[-1].index + 1
    tokens, cached = sum(each.num_tokens for each in bands), sum(each.cached for each in bands)
    return BandGroup(first, last, tokens, cached, (min(turns), max(turns)) if turns else None)


def is_generated(segment: Segment) -> bool:
    """Return whether a segment holds tokens exactly as the model generated them."""
    return segment.name.endswith(": as generated")


def kind_of(segment: Segment, conversation: Conversation) -> str:
    """Return the kind of a segment, a key of `KINDS`."""
    part, _, what = segment.name.partition(": ")
    if part.startswith("message "):
        if what in FIELD_KINDS:
            return FIELD_KINDS[what]
        number = segment.turn if segment.turn is not None else int(part.split()[1])
        turns = conversation.turns
        return ROLE_KINDS[turns[number].role] if number < len(turns) else "answer"
    word = part.split()[0]
    return word if word in KINDS else "template"


@dataclass(frozen=True)
class TemplateChoices:
    """The templates that a conversation can use: the model's own, and `others` by name.

    `reader(name)` returns the `PromptReader` of one template.
    """

    tokenizer: Tokenizer
    own: ChatTemplate | None
    others: Mapping[str, ChatTemplate] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, others: Mapping[str, Any]) -> TemplateChoices:
        """Collect the templates of a model and `others`: Jinja texts, folders of models, or ChatTemplates.

        Raises:
            WorkbenchError: the model has no tokenizer, there is no template, or one of `others` is not a template.
        """
        tokenizer, own = getattr(model, "tokenizer", None), getattr(model, "chat_template", None)
        if not isinstance(tokenizer, Tokenizer):
            raise WorkbenchError(
                f"PromptView: {type(model).__name__} has no tokenizer; give a runner of a model that has one"
            )
        names = own.names if own is not None else {}
        found = {name: _as_template(each, name, names) for name, each in others.items()}
        if own is None and not found:
            raise WorkbenchError("PromptView: this model has no chat template; give one with templates={'name': text}")
        return cls(tokenizer, own, found)

    @property
    def names(self) -> tuple[str, ...]:
        return (*(self.own.texts if self.own is not None else ()), *self.others)

    def choose(self, conversation: Conversation) -> str:
        """Return the name of a conversation's template. Raises WorkbenchError for an unknown name."""
        name = conversation.template
        if name is not None and name in self.others:
            return name
        return next(iter(self.others)) if self.own is None else self.own.choose(name, bool(conversation.tools))

    def text(self, name: str) -> str:
        """Return the Jinja text of a template."""
        return self.others[name].text if name in self.others else self.own.texts[name] if self.own is not None else ""

    def reader(self, name: str) -> _Reader:
        return _Reader(self.tokenizer, self.others.get(name, self.own))

    def conversation(self, conversation: Conversation, name: str, arguments: Mapping[str, Any]) -> Conversation:
        """Return the conversation with the template `name` and further template arguments."""
        wanted = None if name in self.others else name
        merged = {**conversation.template_arguments, **arguments}
        return conversation.model_copy(update={"template": wanted, "template_arguments": merged})


@dataclass(frozen=True)
class _Reader:
    """A tokenizer with a chosen template."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def _as_template(given: Any, name: str, names: Mapping[str, str]) -> ChatTemplate:
    if isinstance(given, ChatTemplate):
        return given
    if isinstance(given, Path) or (isinstance(given, str) and "{" not in given and Path(given).is_dir()):
        found = ChatTemplate.from_folder(given)
        if found is None:
            raise WorkbenchError(f"templates.{name}: {given} has no chat template")
        return found
    if isinstance(given, str):
        return ChatTemplate(given, names, f"templates.{name}")
    raise WorkbenchError(f"templates.{name}: give a Jinja text, a model's folder or a ChatTemplate, not {given!r}")


def as_conversation(given: Any) -> Conversation:
    """Return a Conversation unchanged, or make one from a text or from messages in OpenAI's format.

    Raises:
        WorkbenchError: the value has another type.
    """
    if isinstance(given, Conversation):
        return given
    if isinstance(given, str):
        return Conversation(turns=[given])
    if isinstance(given, list | tuple):
        return Conversation.from_messages(given)
    raise WorkbenchError(f"PromptView: give a Conversation, a text, or messages, not {type(given).__name__}")
