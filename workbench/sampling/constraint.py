"""Constrain what a request may say next: a thought within its budget, then an answer of its grammar, closed in time.

banned(draft)     rows of forbidden tokens, beside the forward pass; the state stays
search(budget)    go on with the search for an end that a token waits for, beside the forward pass too
advance(choice)   take the sampled token, or the first of the shortest way to the end where it leaves no time for one
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.prompt.answers import control_tokens
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request
from workbench.sampling.answer import NO_TOKEN, SEARCHING, Answer
from workbench.sampling.closing import NodeBudget
from workbench.sampling.grammar import Grammar
from workbench.sampling.samplers import SampledToken
from workbench.sampling.thought import ThoughtState, thinking_budget


class Constraint:
    """A request's thought and answer in progress. `advance` moves it; nothing else does."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        end_token_ids: Collection[int],
        grammar: Grammar | None,
    ):
        """Create the constraint of a request that begins.

        Raises:
            WorkbenchError: if its shortest answer has no room, or the tokenizer lacks the thought's control tokens.
        """
        sampling = request.sampling
        self.answer = None if grammar is None else Answer(grammar, end_token_ids)
        self._vocab_size = vocab_size
        self._known_ids = vocab_size if tokenizer is None else tokenizer.vocab_size
        self._answer_left = sampling.max_tokens
        self.waiting: SampledToken | None = None  # a token that waits for the end from behind it
        self._left = min(sampling.max_output_tokens, max_model_len - len(request.prompt_ids))
        needed = 1 if self.answer is None else self.answer.tokens_to_end()
        if needed is None:
            raise WorkbenchError("response_format: this vocabulary cannot spell an answer of the grammar")
        self.thought: ThoughtState | None = None
        self._not_in_thought: frozenset[int] = frozenset()  # it is text: what its turn shows of it are its tokens
        if sampling.thinking is not None:
            self.thought = ThoughtState.start(request, tokenizer, thinking_budget(request, max_model_len, needed))
            assert tokenizer is not None
            controls = {*control_tokens(tokenizer).values(), self.thought.opening} - {self.thought.closing}
            self._not_in_thought = frozenset(id for id in (*controls, *end_token_ids) if id < vocab_size)
        closing = int(self.thought is not None and self.thought.phase == "open")
        room = min(self._answer_left, self._left - closing)
        if self.answer is not None and needed > room:
            raise WorkbenchError(
                f"response_format: its shortest answer has {needed} tokens, and there is room for {max(room, 0)}: "
                "raise max_tokens, or shorten the prompt"
            )

    @property
    def is_closing(self) -> bool:
        """Return whether the answer is cut short, to end within its tokens."""
        return self.answer is not None and self.answer.shortened

    def resume(self, generated_ids: Sequence[int], closing: bool) -> list[Literal["", "grammar", "length"]]:
        """Take the tokens that came before, as they were sampled or put in place of a sampled one.

        Args:
            generated_ids: the tokens.
            closing: whether the answer was being cut short after them, which the tokens alone do not say.

        Returns:
            what completed the answer with each token, or nothing.

        Raises:
            WorkbenchError: for a token that could not have come.
        """
        if self.answer is not None:
            self.answer.shortened = closing
        completions: list[Literal["", "grammar", "length"]] = []
        for place, token in enumerate(generated_ids):
            moved = self.advance(SampledToken(token))
            if moved is None or moved[0] != token:
                raise WorkbenchError(f"generated_ids: token {token} at place {place} leaves the answer no end")
            completions.append(moved[1])
        return completions

    def legal_count(self, draft: Sequence[int]) -> int:
        """Return how many of these draft tokens may follow one another."""
        thought = self.thought
        if self.waiting is not None:
            return 0
        for place, token in enumerate(draft):
            if thought is None or thought.phase == "after" or not self._is_thought(thought, token):
                return place + (len(draft) - place if self.answer is None else self.answer.legal_count(draft[place:]))
            if not self._thinks(thought, token):
                return place
            thought = thought.after(token)
        return len(draft)

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return which tokens must not come next, and after each legal draft token: [1 + draft token, vocab]."""
        banned = np.zeros((1 + len(draft), self._vocab_size), np.bool_)
        thought = self.thought
        for place in range(1 + len(draft)):
            if thought is None or thought.phase != "open":
                if self.answer is not None:
                    self.answer.ban(draft[place:], banned[place:], min(self._answer_left, self._left - place))
                if thought is not None:
                    self._ban_second_thought(thought, draft[place:], banned[place:])
                if thought is None or place == len(draft) or draft[place] != thought.opening:
                    return banned
            elif thought.must_close:
                banned[place] = True
                banned[place, thought.closing] = False
            else:
                banned[place, [*self._not_in_thought]] = True
                banned[place, self._known_ids :] = True
            if place < len(draft):
                if banned[place, draft[place]]:
                    return banned
                thought = thought.after(draft[place])
        return banned

    def _ban_second_thought(self, thought: ThoughtState, draft: Sequence[int], banned: NDArray[np.bool_]) -> None:
        """Let a thought open before everything else, once, and close no thought that is not open."""
        opens = thought.phase == "before" and thought.budget > 0
        banned[:, thought.closing] = True
        banned[0, thought.opening] = not opens
        banned[1:, thought.opening] = True

    def forced(self) -> int | None:
        """Return the only token that may come next, where an answer is closed for want of room."""
        thinks = self.thought is not None and self.thought.phase == "open"
        return None if self.answer is None or thinks else self.answer.forced(min(self._answer_left, self._left))

    def search(self, budget: NodeBudget) -> None:
        """Go on with the search that a token waits for."""
        if self.answer is not None:
            self.answer.search(budget)

    def advance(
        self, choice: SampledToken, budget: NodeBudget | None = None
    ) -> tuple[int, Literal["", "grammar", "length"]] | None:
        """Take the sampled token; return the token that is taken, and what completes the answer with it, if it is.

        The token is NO_TOKEN where the answer has to end before it. None says that the token has to wait, and nothing
        has changed but `waiting`: call again with that, after `search`.

        Args:
            choice: the sampled token; `waiting` where it is set.
            budget: what the search for an end may cost now; None lets it go on to its end.
        """
        thought, token = self.thought, choice.token_id
        after = None if thought is None else thought.after(token)
        if thought is not None and after is not None and "open" in (thought.phase, after.phase):
            self.thought = after
            self._left -= 1
            return token, ""
        left = min(self._answer_left, self._left) - 1
        taken = token if self.answer is None else self.answer.advance(token, left, budget)
        self.waiting = choice if taken == SEARCHING else None
        if taken == SEARCHING:
            return None
        self.thought = after
        self._left -= 1
        self._answer_left -= 1
        if self.answer is None:
            return token, ""
        if taken == NO_TOKEN:
            return NO_TOKEN, "length"
        if not self.answer.is_complete:
            return taken, ""
        return taken, "length" if self.answer.shortened else "grammar"

    @staticmethod
    def _is_thought(thought: ThoughtState, token: int) -> bool:
        return thought.phase == "open" or token == thought.opening

    def _thinks(self, thought: ThoughtState, token: int) -> bool:
        if thought.phase == "before":
            return thought.budget > 0
        if thought.must_close:
            return token == thought.closing
        return token not in self._not_in_thought and token < self._known_ids
