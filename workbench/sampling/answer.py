"""Follow an answer of a grammar: the tokens that may come next, and the shortest way to its end from where it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.sampling.closing import EndSearch, NodeBudget
from workbench.sampling.grammar import Grammar, error_sentence, quotes_end
from workbench.sampling.json_text import JsonPlace
from workbench.sampling.spelling import Spelling

NO_TOKEN = -1
SEARCHING = -2


class Answer:
    """A text of a grammar in progress.

    `way` has symbols after which it is complete, in as many tokens as are left or fewer. A token is taken once such a
    way is known from behind it. While that is still searched for the token waits, and no other is taken.
    """

    def __init__(self, grammar: Grammar, end_token_ids: Collection[int]):
        self.grammar, self.vocabulary = grammar, grammar.vocabulary
        self._tokens, self._symbols = grammar.tokens.deep_copy(), grammar.symbols.deep_copy()
        self._end_ids = sorted(end_token_ids)
        self._speller = self.vocabulary.speller.without(end_token_ids)
        self._spelling = Spelling(self._speller)
        self._search: EndSearch | None = None  # from behind the token that waits
        self.way = grammar.shortest
        self._place = JsonPlace() if quotes_end(grammar.response_format) else None
        self.shortened = False  # a token was replaced for want of room, so that the text is not the model's alone

    @property
    def is_complete(self) -> bool:
        """Return whether nothing may follow."""
        return self._tokens.is_stopped()

    @property
    def waits(self) -> bool:
        """Return whether a token waits for the way to the end from behind it."""
        return self._search is not None

    def tokens_to_end(self) -> int | None:
        """Return the number of tokens of the way to the end; None if the vocabulary cannot spell it."""
        return self._spelling.count(self.way)

    def legal_count(self, draft: Sequence[int]) -> int:
        """Return how many of these tokens may follow one another; an end token is the last."""
        count = self._tokens.validate_tokens([each for each in draft if each < self.vocabulary.size])
        return count + 1 if count < len(draft) and draft[count] in self._end_ids else min(count, len(draft))

    def search(self, budget: NodeBudget) -> None:
        """Go on with the search that a token waits for."""
        if self._search is not None:
            self._search.run(budget)

    def ban(self, draft: Sequence[int], banned: NDArray[np.bool_], left: int) -> None:
        """Write the tokens that must not come next into a row, and those after each legal draft token into the next.

        Args:
            draft: tokens that may follow.
            banned: [1 + draft token, vocab], to be written.
            left: tokens that may still come.
        """
        size = self.vocabulary.size
        bits = np.empty((1, (size + 32) // 32), np.int32)  # the compiler's vocabulary has one token more, the end
        way, forced, json_place = self.way, self.forced(left), self._place
        consumed = 0
        for place in range(1 + len(draft)):
            fill_next_token_bitmask(self._tokens, bits, 0)
            if self._tokens.is_error():
                raise WorkbenchError(f"response_format: {error_sentence(self._tokens.get_error())}; make it smaller")
            allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[0]
            banned[place, :size] = allowed[:size] == 0
            banned[place, size:] = True
            banned[place, self._end_ids] = not allowed[size]
            for token in self._end_ids:  # a control token that ends the grammar too
                if token in self.vocabulary.symbol_of and allowed[token] and self._completes(token):
                    banned[place, token] = False
            if json_place is not None:
                self.vocabulary.digits.ban(json_place, banned[place])
            if forced is not None:
                banned[place] = True
                banned[place, forced] = False
            if place == len(draft) or banned[place, draft[place]] or draft[place] in self._end_ids:
                break
            self._tokens.consume_token(draft[place])
            consumed += 1
            symbols = self.vocabulary.symbols(draft[place])
            way, json_place = way[len(symbols) :], json_place and json_place.after(symbols)
            forced = None if forced is None else self._spelling.first(way)
        if consumed:
            self._tokens.rollback(consumed)

    def _completes(self, token: int) -> bool:
        self._tokens.consume_token(token)
        complete = self._tokens.is_accepting()
        self._tokens.rollback(1)
        return complete

    def forced(self, left: int) -> int | None:
        """Return the next token of the way to the end, if the answer is on it for want of room, with `left` to come."""
        if not self.shortened or not self.way or self._fits(self.way, left - 1):
            return None
        return self._spelling.first(self.way)

    def advance(self, token: int, left: int, budget: NodeBudget | None = None) -> int:
        """Take `token`, or where no end fits into the `left` tokens after it the first token of the way to the end.

        Args:
            token: the sampled token; the one that waits, if one does.
            left: tokens that may come after it.
            budget: what a search for the end from behind it may cost now; None lets it go on to its end.

        Returns:
            the token that is taken; NO_TOKEN where the way is at its end, and the answer ends without another token;
            SEARCHING where the token has to wait.
        """
        if token in self._end_ids:
            return token
        symbols = self.vocabulary.symbols(token)
        self._consume(token, symbols)
        way = self._way_after(symbols, budget)
        if self._search is not None:
            self._undo(symbols)
            return SEARCHING
        if way is None or not self._fits(way, left):
            self._undo(symbols)
            self.shortened = True
            if not self.way:
                return NO_TOKEN
            first = self._spelling.first(self.way)
            if first is None:
                raise WorkbenchError("response_format: no end of the answer can be spelt with this vocabulary")
            token, symbols = first, self.vocabulary.symbols(first)
            self._consume(token, symbols)
            way = self.way[len(symbols) :]
        self.way = way
        self._place = self._place and self._place.after(symbols)
        return token

    def _consume(self, token: int, symbols: list[int]) -> None:
        if not (self._tokens.consume_token(token) and self._symbols.consume_tokens(symbols)):
            error = self._tokens.get_error() or self._symbols.get_error()
            why = f"{error_sentence(error)}; make it smaller" if error else "the grammar forbids it"
            raise WorkbenchError(f"response_format: token {token}: {why}")

    def _undo(self, symbols: list[int]) -> None:
        self._tokens.rollback(1)
        self._symbols.rollback(len(symbols))

    def _way_after(self, symbols: list[int], budget: NodeBudget | None) -> tuple[int, ...] | None:
        """Return the way to the end after `symbols`, which are consumed; None if none was found, or not yet."""
        if self.way[: len(symbols)] == tuple(symbols):
            return self.way[len(symbols) :]
        search = self._search
        if search is None:
            known, quotes = [(), self.way[1:], self.way], quotes_end(self.grammar.response_format)
            search = EndSearch(self._symbols, self.vocabulary.end_symbol, known, self.grammar.hints, quotes)
            if not search.run(budget):
                search.keep_state()
        else:
            search.run(budget)
        self._search = None if search.done else search
        return search.found

    def _fits(self, way: tuple[int, ...], left: int) -> bool:
        """Return whether the way is spelt in `left` tokens or fewer."""
        if len(way) <= left and self._speller.has_each(way):
            return True
        count = self._spelling.count(way)
        return count is not None and count <= left
