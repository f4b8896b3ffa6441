"""Track an answer that follows a grammar: the allowed next tokens, and a short completion from the current state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from workbench.constrained.closing import EndSearch, NodeBudget
from workbench.constrained.constraint import Constraint, Taken
from workbench.constrained.grammar import Grammar, error_sentence, quotes_end
from workbench.constrained.json_text import JsonPlace
from workbench.constrained.spelling import Spelling
from workbench.errors import WorkbenchError
from workbench.request import FinishReason


class GrammarAnswer(Constraint):
    """An answer in progress that can always be completed within its token limit.

    `way` has symbols that complete the answer in `left` tokens or fewer. A sampled token is accepted if the answer can
    still be completed after it. Otherwise the first token of `way` replaces it, or the answer ends if it is complete.
    The result depends only on the tokens and `left`: a search has the same result when it runs in several parts.
    """

    def __init__(self, grammar: Grammar, end_token_ids: Collection[int], vocab_size: int, left: int | None = None):
        self._vocab_size, self.left = vocab_size, self.left if left is None else left
        self.grammar, self.vocabulary = grammar, grammar.vocabulary
        self._tokens, self._symbols = grammar.tokens.deep_copy(), grammar.symbols.deep_copy()
        self._end_ids = sorted(end_token_ids)
        self._speller = self.vocabulary.speller.without(end_token_ids)
        self._spelling = Spelling(self._speller)
        self._waiting: int | None = None  # a token that waits for the completion search after it
        self._search: EndSearch | None = None
        self._place = JsonPlace() if quotes_end(grammar.response_format) else None
        self.way = grammar.shortest

    def tokens_to_end(self) -> int | None:
        """Return the number of tokens of the completion `way`; None if the vocabulary cannot spell it."""
        return self._spelling.count(self.way)

    def legal_count(self, draft: Sequence[int]) -> int:
        """Return the length of the longest legal prefix of `draft`; an end token ends the prefix."""
        if self._waiting is not None:
            return 0
        count = self._tokens.validate_tokens([each for each in draft if each < self.vocabulary.size])
        return count + 1 if count < len(draft) and draft[count] in self._end_ids else min(count, len(draft))

    def work(self, budget: NodeBudget) -> None:
        if self._search is not None:
            self._search.run(budget)

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        size, json_place = self.vocabulary.size, self._place
        banned = np.zeros((1 + len(draft), self._vocab_size), np.bool_)
        bits = np.empty((1, (size + 32) // 32), np.int32)  # the compiler's vocabulary has an additional end token
        consumed = 0
        for place in range(1 + len(draft)):
            fill_next_token_bitmask(self._tokens, bits, 0)
            if self._tokens.is_error():
                raise WorkbenchError(f"response_format: {error_sentence(self._tokens.get_error())}; make it smaller")
            allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[0]
            banned[place, :size] = allowed[:size] == 0
            banned[place, size:] = True
            banned[place, self._end_ids] = not allowed[size]
            for token in self._end_ids:  # an end token may also be a control token of the grammar
                if token in self.vocabulary.symbol_of and allowed[token] and self._completes(token):
                    banned[place, token] = False
            if json_place is not None:
                self.vocabulary.digits.ban(json_place, banned[place])
            if place == len(draft) or banned[place, draft[place]] or draft[place] in self._end_ids:
                break
            self._tokens.consume_token(draft[place])
            consumed += 1
            json_place = json_place and json_place.after(self.vocabulary.symbols(draft[place]))
        if consumed:
            self._tokens.rollback(consumed)
        return banned

    def _completes(self, token: int) -> bool:
        self._tokens.consume_token(token)
        complete = self._tokens.is_accepting()
        self._tokens.rollback(1)
        return complete

    def advance(self, token: int, budget: NodeBudget | None = None) -> Taken:
        token = token if self._waiting is None else self._waiting
        if token in self._end_ids:
            return token, FinishReason.STOP
        way = self._consume(token, budget)
        if self._search is not None:
            self._undo(token)
            self._waiting = token
            return None, None
        self._waiting = None
        if way is None or not self._fits(way, self.left - 1):
            self._undo(token)
            if not self.way:
                return None, FinishReason.LENGTH
            first = self._spelling.first(self.way)
            assert first is not None
            token, way = first, self._consume(first, None) or ()
        self.way, self.left = way, self.left - 1
        self._place = self._place and self._place.after(self.vocabulary.symbols(token))
        return token, FinishReason.STOP if self._tokens.is_stopped() else None

    def _consume(self, token: int, budget: NodeBudget | None) -> tuple[int, ...] | None:
        """Consume a token; return symbols that complete the answer after it, None if none were found (yet)."""
        symbols = self.vocabulary.symbols(token)
        if not (self._tokens.consume_token(token) and self._symbols.consume_tokens(symbols)):
            error = self._tokens.get_error() or self._symbols.get_error()
            why = f"{error_sentence(error)}; make it smaller" if error else "the grammar forbids it"
            raise WorkbenchError(f"response_format: token {token}: {why}")
        if self.way[: len(symbols)] == tuple(symbols):
            return self.way[len(symbols) :]
        search = self._search
        if search is None:
            ends, quotes = [(), self.way[1:], self.way], quotes_end(self.grammar.response_format)
            search = EndSearch(self._symbols, self.vocabulary.end_symbol, ends, self.grammar.hints, quotes)
            if not search.run(budget):
                search.keep_state()
        else:
            search.run(budget)
        self._search = None if search.done else search
        return search.way

    def _undo(self, token: int) -> None:
        self._tokens.rollback(1)
        self._symbols.rollback(len(self.vocabulary.symbols(token)))

    def _fits(self, way: tuple[int, ...], left: int) -> bool:
        """Return whether `left` tokens can spell `way`."""
        if len(way) <= left and self._speller.has_each(way):
            return True
        count = self._spelling.count(way)
        return count is not None and count <= left
