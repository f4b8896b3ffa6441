"""Build the constraint of a request from its settings."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np

from workbench.constrained.answer import GrammarAnswer
from workbench.constrained.compiler import GrammarCompiler
from workbench.constrained.constraint import Constraint, Unconstrained
from workbench.constrained.custom import CustomConstraint
from workbench.constrained.grammar import Grammar
from workbench.constrained.thought import ThoughtState, ThoughtThenAnswer, thinking_budget
from workbench.errors import WorkbenchError
from workbench.prompt.answers import control_tokens
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request


class ConstraintFactory:
    """A factory for the constraints of one model's requests; `compiler` compiles their grammars beforehand."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self.compiler = GrammarCompiler(tokenizer)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def build(
        self, request: Request, max_model_len: int, end_token_ids: Collection[int], grammar: Grammar | None
    ) -> Constraint | None:
        """Return the constraint of a new request; None if it has none.

        Raises:
            WorkbenchError: if its shortest answer does not fit, the tokenizer lacks the thought's control tokens, or
                its user-defined constraint fails to start.
        """
        sampling, needed = request.sampling, 1
        room = min(sampling.max_output_tokens, max_model_len - len(request.prompt_ids))
        answer: Constraint | None = None
        if grammar is not None:
            answer = GrammarAnswer(grammar, end_token_ids, self._vocab_size, min(sampling.max_tokens, room))
            shortest = answer.tokens_to_end()
            if shortest is None:
                raise WorkbenchError("response_format: this vocabulary cannot spell an answer of the grammar")
            needed = shortest
        elif sampling.constraint is not None:
            answer = CustomConstraint(sampling.constraint, self._texts, end_token_ids)
        answer_room = room
        if sampling.thinking is not None:
            thought = ThoughtState.start(request, self._tokenizer, thinking_budget(request, max_model_len, needed))
            answer_room -= thought.phase == "open"  # for the token that closes the thought
            constraint = self._after_thought(thought, answer or Unconstrained(self._vocab_size), room, end_token_ids)
        else:
            constraint = answer
        answer_room = min(answer_room, sampling.max_tokens)
        if grammar is not None and needed > answer_room:
            raise WorkbenchError(
                f"response_format: its shortest answer has {needed} tokens, and there is room for "
                f"{max(answer_room, 0)}: raise max_tokens, or shorten the prompt"
            )
        return constraint

    @cached_property
    def _texts(self) -> list[bytes]:
        """Return the text of each token id: empty for a control token, and for an id that the tokenizer lacks."""
        texts, tokenizer = [b""] * self._vocab_size, self._tokenizer
        if tokenizer is not None:
            controls = set(control_tokens(tokenizer).values())
            for id in range(min(self._vocab_size, tokenizer.vocab_size)):
                texts[id] = b"" if id in controls else tokenizer.token_bytes(id)
        return texts

    def _after_thought(
        self, thought: ThoughtState, answer: Constraint, room: int, end_token_ids: Collection[int]
    ) -> Constraint:
        """Return a constraint that begins with a thought of text tokens only, without control tokens.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        not_in_thought = np.arange(self._vocab_size) >= tokenizer.vocab_size
        controls = {*control_tokens(tokenizer).values(), thought.opening, *end_token_ids} - {thought.closing}
        not_in_thought[[each for each in controls if each < self._vocab_size]] = True
        return ThoughtThenAnswer(thought, answer, room, not_in_thought)
