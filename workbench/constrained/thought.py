"""Track a thought before an answer: whether it is open, its number of tokens, and when it must close.

before --opening--> open --closing--> after
   \\-------- any other token --------/^
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.constrained.closing import NodeBudget
from workbench.constrained.constraint import Constraint, Taken
from workbench.errors import WorkbenchError
from workbench.prompt.answers import THOUGHTS, control_tokens
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request
from workbench.response_format import Thinking

SENTENCE_ENDS = (b".", b"!", b"?", b"\n")


@dataclass(frozen=True)
class ThoughtState:
    """The state of a request's thought after some of its tokens; `after(token)` returns the state after one more."""

    opening: int
    closing: int
    budget: int
    soft_tokens: int
    ends_sentence: Callable[[int], bool] = field(repr=False, compare=False)
    phase: Literal["before", "open", "after"] = "before"
    tokens: int = 0  # tokens between the two control tokens
    must_close: bool = False

    @classmethod
    def start(cls, request: Request, tokenizer: Tokenizer | None, budget: int) -> ThoughtState:
        """Return the state after the prompt, which may have opened the thought.

        Raises:
            WorkbenchError: for a control token that the tokenizer lacks.
        """
        settings = request.sampling.thinking
        assert settings is not None
        opening, closing = (_token_id(tokenizer, name, settings) for name in (settings.opening, settings.closing))
        assert tokenizer is not None
        last = {id: place for place, id in enumerate(request.prompt_ids) if id in (opening, closing)}
        is_open = last.get(opening, -1) > last.get(closing, -1)

        def ends_sentence(token: int) -> bool:
            return tokenizer.token_bytes(token).rstrip(b" ").endswith(SENTENCE_ENDS)

        soft = min(settings.soft_tokens, budget // 2)
        phase = "open" if is_open else "before"
        return cls(opening, closing, budget, soft, ends_sentence, phase, must_close=is_open and budget == 0)

    def after(self, token: int) -> ThoughtState:
        """Return the state after `token`."""
        if self.phase == "before":
            opened = token == self.opening
            return replace(self, phase="open" if opened else "after", must_close=opened and self.budget == 0)
        if self.phase == "after":
            return self
        if token == self.closing:
            return replace(self, phase="after", must_close=False)
        count = self.tokens + 1
        soft = count >= self.budget - self.soft_tokens and self.ends_sentence(token)
        return replace(self, tokens=count, must_close=count >= self.budget or soft)


class ThoughtThenAnswer(Constraint):
    """A constraint on a thought within its token budget, then on the answer after it."""

    def __init__(self, thought: ThoughtState, answer: Constraint, room: int, not_in_thought: NDArray[np.bool_]):
        """Start in the state `thought`, which may be open.

        Args:
            thought: the state of the thought.
            answer: the constraint of the answer.
            room: maximum tokens of thought and answer together.
            not_in_thought: [vocab], tokens that are not text.
        """
        self.thought, self.answer, self.left = thought, answer, room
        self._not_in_thought = not_in_thought
        self._answer_waits = False

    def legal_count(self, draft: Sequence[int]) -> int:
        thought = self.thought
        for place, token in enumerate(draft):
            if self._answer_waits or (thought.phase != "open" and not self._opens(thought, token)):
                return place + self.answer.legal_count(draft[place:])
            if thought.phase == "open" and self._open_row(thought)[token]:
                return place
            thought = thought.after(token)
        return len(draft)

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        banned = np.zeros((1 + len(draft), len(self._not_in_thought)), np.bool_)
        thought = self.thought
        for place in range(1 + len(draft)):
            if thought.phase == "open":
                banned[place] = self._open_row(thought)
            else:
                opens = place < len(draft) and self._opens(thought, draft[place])
                answer_draft = () if opens else draft[place:]
                banned[place : place + 1 + len(answer_draft)] = self.answer.banned(answer_draft)
                banned[place:, [thought.opening, thought.closing]] = True
                banned[place, thought.opening] = not self._opens(thought, thought.opening)
            if place == len(draft) or banned[place, draft[place]]:
                break
            if thought.phase != "open" and draft[place] != thought.opening:
                break
            thought = thought.after(draft[place])
        return banned

    def work(self, budget: NodeBudget) -> None:
        self.answer.work(budget)

    def advance(self, token: int, budget: NodeBudget | None = None) -> Taken:
        after = self.thought.after(token)
        if not self._answer_waits and "open" in (self.thought.phase, after.phase):
            self.thought, self.left = after, self.left - 1
            self.answer.left = min(self.answer.left, self.left)
            return token, None
        taken = self.answer.advance(token, budget)
        self._answer_waits = taken == (None, None)
        if not self._answer_waits:
            self.thought, self.left = replace(self.thought, phase="after"), self.left - 1
        return taken

    def _opens(self, thought: ThoughtState, token: int) -> bool:
        return thought.phase == "before" and thought.budget > 0 and token == thought.opening

    def _open_row(self, thought: ThoughtState) -> NDArray[np.bool_]:
        """Return the forbidden next tokens in an open thought: [vocab]."""
        if not thought.must_close:
            return self._not_in_thought
        row = np.ones_like(self._not_in_thought)
        row[thought.closing] = False
        return row


def with_own_thought(request: Request, tokenizer: Tokenizer | None) -> Request:
    """Return the request, changed if its prompt opens a thought: its grammar then begins after the thought. Some
    templates (QwQ's, DeepSeek-R1's) open a thought even if the request has no settings for it. The thought's budget is
    the part of max_tokens that the answer does not need.
    """
    sampling = request.sampling
    if tokenizer is None or sampling.response_format is None or sampling.thinking is not None:
        return request
    named, last = control_tokens(tokenizer), {id: place for place, id in enumerate(request.prompt_ids)}
    for marks in THOUGHTS:
        opening, closing = (last.get(named[mark], -1) if mark in named else None for mark in marks)
        if opening is not None and closing is not None and opening > closing:
            own = Thinking(
                budget_tokens=sampling.max_tokens, opening=marks[0], closing=marks[1], within_max_tokens=True
            )
            return replace(request, sampling=sampling.model_copy(update={"thinking": own}))
    return request


def thinking_budget(request: Request, max_model_len: int, least_answer: int = 1) -> int:
    """Return the maximum number of tokens of a thought: its budget, reduced if the answer would not fit.

    Args:
        request: the request.
        max_model_len: maximum tokens of prompt and output together.
        least_answer: tokens that the answer needs.
    """
    sampling = request.sampling
    assert sampling.thinking is not None
    room = max_model_len - len(request.prompt_ids)
    if sampling.thinking.within_max_tokens:
        left = min(room, sampling.max_tokens) - least_answer
    else:
        left = room - sampling.max_tokens
    return max(0, min(sampling.thinking.budget_tokens, left - 2))


def _token_id(tokenizer: Tokenizer | None, name: str, settings: Thinking) -> int:
    ids = [] if tokenizer is None else tokenizer.encode(name, special=True)
    if len(ids) != 1:
        names = ", ".join(tokenizer.special_token_ids) if tokenizer is not None else "none: the model has no tokenizer"
        raise WorkbenchError(f"thinking: {name!r} is not a single token of this model; its control tokens are {names}")
    return ids[0]
