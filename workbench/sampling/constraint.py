"""Constrain what a request may say next: a thought within its budget, then an answer of its grammar, closed in time.

banned(draft)     rows of forbidden tokens, beside the forward pass; the state stays
advance(token)    take the sampled token, or the first of the shortest way to the end where it leaves no time for one
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import Request
from workbench.sampling.closing import find_end
from workbench.sampling.grammar import Grammar, quotes_end
from workbench.sampling.thought import Thought, thinking_budget

NO_TOKEN = -1


class Answer:
    """A text of a grammar in progress. `way` has symbols after which it is complete."""

    def __init__(self, grammar: Grammar, end_token_ids: Collection[int]):
        self.grammar, self.vocabulary = grammar, grammar.vocabulary
        self._tokens, self._symbols = grammar.tokens.deep_copy(), grammar.symbols.deep_copy()
        self._end_ids = sorted(end_token_ids)
        self._speller = self.vocabulary.speller.without(end_token_ids)
        self.way = grammar.shortest

    @property
    def is_complete(self) -> bool:
        """Return whether nothing may follow."""
        return self._tokens.is_stopped()

    def tokens_to_end(self) -> int | None:
        """Return the number of tokens of the way to the end; None if the vocabulary cannot spell it."""
        spelt = self._speller.spell(self.way)
        return None if spelt is None else len(spelt)

    def legal_count(self, draft: Sequence[int]) -> int:
        """Return how many of these tokens may follow one another; an end token is the last."""
        count = self._tokens.validate_tokens([each for each in draft if each < self.vocabulary.size])
        return count + 1 if count < len(draft) and draft[count] in self._end_ids else min(count, len(draft))

    def ban(self, draft: Sequence[int], banned: NDArray[np.bool_]) -> None:
        """Fill `banned` [1 + draft token, vocab]: after an illegal draft token rows are left as they are."""
        size = self.vocabulary.size
        bits = np.zeros((1, (size + 32) // 32), np.int32)
        consumed = 0
        for place in range(1 + len(draft)):
            fill_next_token_bitmask(self._tokens, bits, 0)
            if self._tokens.is_error():
                raise WorkbenchError(f"response_format: {self._tokens.get_error()}")
            allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[0]
            banned[place, :size] = allowed[:size] == 0
            banned[place, size:] = True
            banned[place, self._end_ids] = not allowed[size]
            for token in self._end_ids:  # a control token that ends the grammar too
                if token in self.vocabulary.symbol_of and allowed[token] and self._completes(token):
                    banned[place, token] = False
            if place == len(draft) or banned[place, draft[place]] or draft[place] in self._end_ids:
                break
            self._tokens.consume_token(draft[place])
            consumed += 1
        if consumed:
            self._tokens.rollback(consumed)

    def _completes(self, token: int) -> bool:
        self._tokens.consume_token(token)
        complete = self._tokens.is_accepting()
        self._tokens.rollback(1)
        return complete

    def advance(self, token: int, left: int) -> int | None:
        """Take `token`, or where no end fits into the `left` tokens after it the first token of the way to the end.

        Returns:
            the token that is taken; None where the way is at its end, and the answer ends without another token.
        """
        if token in self._end_ids:
            return token
        symbols = self.vocabulary.symbols(token)
        self._consume(token, symbols)
        way = self._way_after(symbols)
        if way is None or not self._fits(way, left):
            self._tokens.rollback(1)
            self._symbols.rollback(len(symbols))
            if not self.way:
                return None
            spelt = self._speller.spell(self.way)
            if not spelt:
                raise WorkbenchError("response_format: no end of the answer can be spelt with this vocabulary")
            token, symbols = spelt[0], self.vocabulary.symbols(spelt[0])
            self._consume(token, symbols)
            way = self.way[len(symbols) :]
        self.way = way
        return token

    def _consume(self, token: int, symbols: list[int]) -> None:
        if not (self._tokens.consume_token(token) and self._symbols.consume_tokens(symbols)):
            error = self._tokens.get_error() or self._symbols.get_error()
            raise WorkbenchError(f"response_format: token {token}: {' '.join(error.split())}")

    def _way_after(self, symbols: list[int]) -> tuple[int, ...] | None:
        if self.way[: len(symbols)] == tuple(symbols):
            return self.way[len(symbols) :]
        known = [self.way[1:], self.way]
        quotes = quotes_end(self.grammar.response_format)
        return find_end(self._symbols, self.vocabulary.end_symbol, known, self.grammar.hints, quotes)

    def _fits(self, way: tuple[int, ...], left: int) -> bool:
        if len(way) <= left and self._speller.has_every_byte:
            return True
        spelt = self._speller.spell(way)
        return spelt is not None and len(spelt) <= left


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
        self._vocab_size, self._end_ids = vocab_size, sorted(end_token_ids)
        self._known_ids = vocab_size if tokenizer is None else tokenizer.vocab_size
        self._answer_left = sampling.max_tokens
        self._shortened = False  # a token was replaced, for want of room
        self._left = min(sampling.max_output_tokens, max_model_len - len(request.prompt_ids))
        needed = 1 if self.answer is None else self.answer.tokens_to_end()
        if needed is None:
            raise WorkbenchError("response_format: this vocabulary cannot spell an answer of the grammar")
        self.thought: Thought | None = None
        if sampling.thinking is not None:
            self.thought = Thought.start(request, tokenizer, thinking_budget(request, max_model_len, needed))
        closing = int(self.thought is not None and self.thought.phase == "open")
        room = min(self._answer_left, self._left - closing)
        if self.answer is not None and needed > room:
            raise WorkbenchError(
                f"response_format: its shortest answer has {needed} tokens, and there is room for {max(room, 0)}: "
                "raise max_tokens, or shorten the prompt"
            )

    def legal_count(self, draft: Sequence[int]) -> int:
        """Return how many of these draft tokens may follow one another."""
        thought = self.thought
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
                    self.answer.ban(draft[place:], banned[place:])
                if thought is not None:
                    self._ban_second_thought(thought, draft[place:], banned[place:])
                if thought is None or place == len(draft) or draft[place] != thought.opening:
                    return banned
            elif thought.must_close:
                banned[place] = True
                banned[place, thought.closing] = False
            else:
                banned[place, [*self._end_ids, thought.opening]] = True
                banned[place, self._known_ids :] = True
            if place < len(draft):
                if banned[place, draft[place]]:
                    return banned
                thought = thought.after(draft[place])
        return banned

    def _ban_second_thought(self, thought: Thought, draft: Sequence[int], banned: NDArray[np.bool_]) -> None:
        """Let a thought open before everything else, once, and close no thought that is not open."""
        opens = thought.phase == "before" and thought.budget > 0
        banned[:, thought.closing] = True
        banned[0, thought.opening] = not opens
        banned[1:, thought.opening] = True

    def advance(self, token: int) -> tuple[int, Literal["", "grammar", "length"]]:
        """Take the sampled token; return the token that is taken, and what completes the answer with it, if it is.

        The token is NO_TOKEN where the answer has to end before it.
        """
        thought = self.thought
        self._left -= 1
        if thought is not None:
            self.thought = thought.after(token)
            if thought.phase == "open" or self.thought.phase == "open":
                return token, ""
        self._answer_left -= 1
        if self.answer is None:
            return token, ""
        taken = self.answer.advance(token, min(self._answer_left, self._left))
        self._shortened |= taken != token
        if taken is None:
            return NO_TOKEN, "length"
        if not self.answer.is_complete:
            return taken, ""
        return taken, "length" if self._shortened else "grammar"

    @staticmethod
    def _is_thought(thought: Thought, token: int) -> bool:
        return thought.phase == "open" or token == thought.opening

    def _thinks(self, thought: Thought, token: int) -> bool:
        if thought.phase == "before":
            return thought.budget > 0
        if thought.must_close:
            return token == thought.closing
        return token not in self._end_ids and token != thought.opening and token < self._known_ids
