"""Assemble the prompt of a conversation: render, encode, put generated tokens back, and fit the context.

    messages -> template -> text with origins -> answers as they were generated -> token ids by segment

A generated turn is text in the conversation, and encoding that text again may give other tokens. So where its rendering
equals the text of its generated tokens, the prompt takes these tokens: then the next prompt begins with the previous
prompt's tokens and the answer's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from itertools import groupby
from typing import Any, Protocol

from workbench.display import Displayable, Table, truncate_text
from workbench.errors import WorkbenchError
from workbench.prompt.answers import AnswerFormat
from workbench.prompt.default_tools import NOTE, fill
from workbench.prompt.kept_answers import KEPT, keep_answers, turn_shown
from workbench.prompt.template_encoding import TokenSpan
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import Tool
from workbench.prompt.traced import TEMPLATE, Origin, Traced, runs_of, traced
from workbench.prompt.turns import AssistantTurn, ResultTurn, UserTurn, unanswered_calls

FIELD_NAMES = {"content": "", "reasoning_content": "thought", "thinking": "thought", "tool_calls": "calls"}
FIXED_PARTS = ("system", "tool", "document", "argument")
EXCERPT = 60  # characters
LATER_SYSTEM = "system message after the first turn; say it in the system prompt, or as a user"


class PromptReader(Protocol):
    """The interface that prompt assembly needs of a model: its tokenizer and template. A runner has it."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...


class Assembled(Protocol):
    """The state of a conversation while its prompt is assembled."""

    @property
    def tools(self) -> tuple[Tool, ...]: ...
    @property
    def documents(self) -> tuple[Any, ...]: ...
    @property
    def turns(self) -> tuple[UserTurn | AssistantTurn | ResultTurn, ...]: ...
    @property
    def template(self) -> str | None: ...
    @property
    def template_arguments(self) -> dict[str, Any]: ...
    @property
    def continues(self) -> bool: ...
    def messages(self) -> list[dict[str, Any]]: ...
    def model_copy(self, *, update: Mapping[str, Any]) -> Any: ...


Overflow = str | Callable[[Any, int], Any]  # refuse, cut_oldest, or (conversation, surplus) -> conversation


@dataclass(frozen=True)
class Segment:
    """Consecutive prompt tokens of one origin: the index of the first token, the token ids, their text, and the number
    of the turn that they show.
    """

    name: str
    start: int
    token_ids: tuple[int, ...]
    text: str
    turn: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Divergence:
    """The first token where a prompt differs from an earlier prompt followed by its answer."""

    token: int
    segment: str
    was: str  # the text from there on, in the earlier prompt
    now: str

    def __str__(self) -> str:
        return f"token {self.token}, in {self.segment}: {self.now!r} in place of {self.was!r}"


@dataclass(frozen=True)
class Prompt(Displayable):
    """The tokens of a conversation, by segment.

    Args:
        ids: the token ids.
        segments: stretches in order; together they hold all tokens.
        text: the text that the template rendered.
        conversation: the assembled conversation, after cuts.
        cut: turns that were left out to fit the context, oldest first.
        answers: by turn, `kept` if the prompt has its generated tokens, else the reason why its text was encoded again.
        cut_tokens: the number of tokens that the cuts removed.
        notes: the parts that were written by the workbench because the template does not show them.
        end_token_ids: the template's control token that ends an answer.
    """

    ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    text: str
    conversation: Any = field(repr=False)
    cut: tuple[UserTurn | AssistantTurn | ResultTurn, ...] = ()
    answers: Mapping[int, str] = field(default_factory=dict)
    cut_tokens: int = 0
    notes: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    decode: Callable[[Sequence[int]], str] = field(default=str, repr=False, compare=False)

    def part_ends(self) -> dict[str, int]:
        """Return for each part that a cache breakpoint may follow (`tools`, `system`, `turn 0`) the number of tokens up
        to its end.
        """
        ends: dict[str, int] = {}
        for segment in self.segments:
            part = segment.name.split(" ")[0].rstrip(":")
            if segment.turn is not None:
                ends[f"turn {segment.turn}"] = segment.end
            elif part in ("system", "tool"):
                ends["tools" if part == "tool" else part] = segment.end
        return ends

    def divergence(self, previous: Prompt) -> Divergence | None:
        """Return the first difference between this prompt and `previous` followed by its answer; None if this prompt
        begins with both.
        """
        expected = previous.ids
        if not self.cut and len(self.conversation.turns) > (number := len(previous.conversation.turns)):
            turn = self.conversation.turns[number]
            expected += turn.generated_ids if isinstance(turn, AssistantTurn) else ()
        place = next((n for n, pair in enumerate(zip(expected, self.ids, strict=False)) if len({*pair}) > 1), None)
        if place is None:
            if len(self.ids) >= len(expected):
                return None
            place = len(self.ids)
        segment = next((each.name for each in self.segments if each.start <= place < each.end), "its end")
        was, now = (truncate_text(self.decode(ids[place : place + 24]), EXCERPT) for ids in (expected, self.ids))
        return Divergence(place, segment, was, now)

    def explain(self, cached_tokens: int | None = None, previous: Prompt | None = None) -> Table:
        """Return a table of the segments: number of tokens, number of cached tokens, and text.

        Args:
            cached_tokens: number of tokens of this prompt in the prefix cache.
            previous: an earlier prompt; a note names the first token and segment that differ from it.
        """
        headings = ["segment", "from token", "tokens", *["cached"] * (cached_tokens is not None), "text"]
        rows: list[list[object]] = []
        for each in self.segments:
            cached = [] if cached_tokens is None else [max(0, min(each.end, cached_tokens) - each.start)]
            text = truncate_text(each.text.replace("\n", "⏎"), EXCERPT)
            rows.append([each.name, each.start, len(each.token_ids), *cached, text])
        notes = [f"{len(self.cut)} oldest turns were cut to fit the context"] if self.cut else []
        notes += self.notes
        notes += [f"turn {number}: {how}" for number, how in self.answers.items() if how != KEPT]
        if previous is not None:
            parted = self.divergence(previous)
            notes.append(
                "the prompt before is a beginning of this one" if parted is None else f"the prefix ends at {parted}"
            )
        return Table(f"prompt: {len(self.ids):,} tokens", rows, headings, "; ".join(notes), left=["text"])

    def _display_table(self) -> Table:
        return self.explain()


def assemble(
    conversation: Assembled,
    model: PromptReader,
    *,
    context: int | None = None,
    max_tokens: int = 1,
    overflow: Overflow = "refuse",
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    now: datetime | None = None,
) -> Prompt:
    """Return the prompt of a conversation.

    Args:
        conversation: the conversation to render.
        model: its tokenizer and chat template.
        context: limit on prompt and answer tokens together; None: no limit.
        max_tokens: tokens kept free for the answer.
        overflow: the policy for a prompt over the context: `refuse` raises; `cut_oldest` drops the oldest questions
            with their answers, never the system prompt, tools, documents or the last question; a function takes the
            conversation and the number of surplus tokens, and returns a shorter conversation.
        add_generation_prompt: end with the opening of an assistant message.
        continue_final_message: end within the last answer, so that the model continues it.
        now: the current time for templates that print it.

    Raises:
        WorkbenchError: the model has no tokenizer or template, the conversation has no turn, the prompt exceeds the
            context, a call has no result, or the template refuses the messages.
    """
    continue_final_message = continue_final_message or conversation.continues
    add_generation_prompt = add_generation_prompt and not continue_final_message
    make = _Assembler(model, add_generation_prompt, continue_final_message, now)
    room = None if context is None else context - max_tokens
    if room is None:
        return make(conversation)
    prompt = make(conversation, room)
    if len(prompt.ids) <= room:
        return prompt
    if callable(overflow):
        shorter = make(overflow(conversation, len(prompt.ids) - room), room)
        return _fitting(shorter, room, max_tokens)
    if overflow == "cut_oldest":
        return _cut_oldest(make, prompt, room, max_tokens)
    if overflow != "refuse":
        raise WorkbenchError(f"overflow: {overflow!r} is unknown; known: refuse, cut_oldest, or a function")
    return _fitting(prompt, room, max_tokens, ", or set overflow to cut_oldest")


def _cut_oldest(make: _Assembler, prompt: Prompt, room: int, max_tokens: int) -> Prompt:
    """Leave out the oldest exchanges, a question with all that follows it, until the prompt fits."""
    conversation = prompt.conversation
    starts = [n for n, turn in enumerate(conversation.turns) if turn.role == "user"]
    begin, whole = 0, len(prompt.ids)
    while len(prompt.ids) > room:
        following = [n for n in starts if n > begin]
        if not following:
            return _fitting(prompt, room, max_tokens)
        excess, first = len(prompt.ids) - room, _first_token(prompt, 0)
        enough = (each for each in following if _first_token(prompt, each - begin) - first >= excess)
        begin = next(enough, following[-1])
        prompt = make(conversation.model_copy(update={"turns": conversation.turns[begin:]}), room)
    return replace(prompt, cut=conversation.turns[:begin], cut_tokens=whole - len(prompt.ids))


def _first_token(prompt: Prompt, turn: int) -> int:
    """Return the index of the first token of a turn, or of the next turn that is shown."""
    return min((each.start for each in prompt.segments if each.turn is not None and each.turn >= turn), default=0)


def _fitting(prompt: Prompt, room: int, max_tokens: int, otherwise: str = "") -> Prompt:
    if len(prompt.ids) <= room:
        return prompt
    largest = max(prompt.segments, key=lambda each: len(each.token_ids))
    raise WorkbenchError(
        f"the prompt has {len(prompt.ids):,} tokens, and {max(0, room):,} fit together with an answer of "
        f"{max_tokens:,}; the largest part is {largest.name} with {len(largest.token_ids):,}: shorten it{otherwise}"
    )


def _check_instructions(text: Traced, conversation: Assembled) -> None:
    """Raise WorkbenchError if the template drops a system message after the first turn."""
    later = {n for n, turn in enumerate(conversation.turns) if turn.role == "system" and turn.content.strip()}
    if later and not later <= {origin.index for _, origin in runs_of(text) if origin.part == "message"}:
        raise WorkbenchError(f"messages: this model's chat template shows no {LATER_SYSTEM}")


class _Assembler:
    """A renderer and encoder of conversations for one model."""

    def __init__(
        self, model: PromptReader, add_generation_prompt: bool, continue_final_message: bool | str, now: datetime | None
    ):
        if model.tokenizer is None:
            raise WorkbenchError("this model has no tokenizer: give token ids in a Request, not a conversation")
        if model.chat_template is None:
            raise WorkbenchError(
                "this model has no chat template: put chat_template.jinja into its folder, or give the prompt as a text"
            )
        self._tokenizer, self._template = model.tokenizer, model.chat_template
        self._options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "now": now or datetime.now(),
        }

    def __call__(self, conversation: Assembled, room: int | None = None) -> Prompt:
        text = self._render(conversation)
        if room is not None:
            self._check_length(text, room)
        name = self._template.choose(conversation.template, bool(conversation.tools))
        encoder = self._template.encoder(self._tokenizer, name)
        ends = self._template.end_token_ids(self._tokenizer, name)
        format = AnswerFormat.from_template(self._template, self._tokenizer, name, conversation.tools)
        opening = cache(lambda: self._opening(conversation))
        kept, answers = keep_answers(text, conversation.turns, encoder, format, ends, opening)
        _check_instructions(text, conversation)
        by_default = bool(conversation.tools) and self._template.gaps(name).tools
        if by_default and all(origin.part != "tool" for _, origin in runs_of(text)):
            raise WorkbenchError("tools: the model's chat template shows neither tools nor a list of them in a message")
        tokens = encoder.encode(kept)
        segments = tuple(_segments(kept, tokens, conversation.turns, self._tokenizer))
        ids = tuple(id for each in segments for id in each.token_ids)
        decode = lambda ids: self._tokenizer.decode(ids, special=True)  # noqa: E731 (of this tokenizer)
        notes = (NOTE,) if by_default else ()
        return Prompt(
            ids, segments, str.__str__(text), conversation, answers=answers, notes=notes, decode=decode,
            end_token_ids=ends,
        )  # fmt: skip

    def _opening(self, conversation: Assembled) -> str:
        """Return the text that the template writes before an answer."""
        question = conversation.model_copy(update={"turns": (UserTurn(content="a"),)})
        texts = [
            str.__str__(self._render(question, add_generation_prompt=thinks, continue_final_message=False))
            for thinks in (True, False)
        ]
        return texts[0].removeprefix(texts[1]) if texts[0].startswith(texts[1]) else texts[0]

    def _render(self, conversation: Assembled, **options: Any) -> Traced:
        if not conversation.turns:
            raise WorkbenchError("conversation: has no turns; add what the user says")
        waiting = unanswered_calls(conversation.turns)
        if waiting and self._options["add_generation_prompt"]:
            raise WorkbenchError(f"conversation: the call of {waiting[0].name!r} has no result; add it with `result`")
        messages = conversation.messages()
        first = len(messages) - len(conversation.turns)
        listed = [
            traced(each, Origin("system") if n < first else Origin("message", n - first))
            for n, each in enumerate(messages)
        ]
        documents = [each.model_dump(exclude_unset=True) for each in conversation.documents]
        tools = [tool.declaration() for tool in conversation.tools]
        name = self._template.choose(conversation.template, bool(tools))
        gaps = self._template.gaps(name)
        try:
            return self._template.render(
                fill(listed, tools, gaps),
                tools=None if gaps.tools else tools or None,
                documents=documents or None,
                template=name,
                arguments=conversation.template_arguments,
                **{**self._options, **options},
            )
        except WorkbenchError as error:
            if all(turn.role != "system" for turn in conversation.turns):
                raise
            raise WorkbenchError(f"{error}; perhaps it shows no {LATER_SYSTEM}") from None

    def _check_length(self, text: Traced, room: int) -> None:
        """Refuse a text that cannot fit before encoding it: the parts that are never cut have too many characters."""
        fixed = [(length, origin) for length, origin in runs_of(text) if origin.part in FIXED_PARTS]
        least = sum(length for length, _ in fixed) // self._tokenizer.max_token_characters
        if least > room:
            _, origin = max(fixed, key=lambda run: run[0])
            raise WorkbenchError(
                f"the prompt has at least {least:,} tokens, and {max(0, room):,} fit; the largest part is "
                f"{origin.part}: shorten it"
            )


def _segments(
    text: Traced,
    tokens: Sequence[TokenSpan],
    turns: Sequence[UserTurn | AssistantTurn | ResultTurn],
    tokenizer: Tokenizer,
) -> Iterator[Segment]:
    """Group tokens by the origin of their first character; replace each stand-in by the generated tokens."""
    ends: list[int] = []
    keys: list[tuple[str, int | None, bool]] = []
    for length, origin in runs_of(text):
        ends.append(length + (ends[-1] if ends else 0))
        keys.append((_name(origin), turn_shown(origin), origin.field == KEPT))
    keys.append(keys[-1] if keys else (_name(TEMPLATE), None, False))  # the key of a token after the last character
    _join_tools(keys)
    characters, start, number = str.__str__(text), 0, 0
    named = []
    for token in tokens:
        while number < len(ends) and ends[number] <= token.first:
            number += 1
        named.append((keys[number], token))
    for (name, shown, kept), group in groupby(named, lambda each: each[0]):
        spans = [token for _, token in group]
        turn = turns[shown] if kept and shown is not None else None
        if isinstance(turn, AssistantTurn):
            ids, words = turn.generated_ids, tokenizer.decode(turn.generated_ids, special=True)
        else:
            ids, words = tuple(token.id for token in spans), characters[spans[0].first : spans[-1].last]
        yield Segment(name, start, ids, words, shown)
        start += len(ids)


def _join_tools(keys: list[tuple[str, int | None, bool]]) -> None:
    """Assign the template's text between two parts of one tool to that tool, so a declaration is one segment."""
    last = 0
    for place, key in enumerate(keys):
        if key[0] != _name(TEMPLATE):
            if key[0].startswith("tool ") and keys[last] == key:
                keys[last:place] = [key] * (place - last)
            last = place


def _name(origin: Origin) -> str:
    if origin.field == KEPT:
        return f"message {origin.index}: as generated"
    if origin.is_written or origin.part == "computed":
        return "template"
    name = origin.part if origin.index is None else f"{origin.part} {origin.index}"
    words = FIELD_NAMES.get(origin.field.split(".")[0], "") if origin.part == "message" else ""
    return f"{name}: {words}" if words else name
