"""Find a short end of a text that a grammar has begun: the closing quotes and brackets, and what is still required.

A grammar is walked in symbols, one for each byte and each control token, so that no vocabulary matters. A search leaves
its matcher as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

BYTES = 256
QUOTE = 34
MAX_SYMBOLS = 20_000  # of an end
MAX_STRUCTURE_SYMBOLS = 64  # a state with more is in free text
KEPT_OF_A_KIND = 3  # states of a level whose next symbols are the same
ALTERNATIVES = 4

# What ends something comes first: brackets and separators before what begins a value, space last.
_ORDER = b'}]",:@.)>/0123456789-ntf'
_SPACE = b" \n\r\t"
_LAST = b"[{(" + _SPACE + b"\\"


class SymbolMatcher(Protocol):
    """The parts of an llguidance matcher over symbols that a search needs."""

    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...
    def compute_ff_bytes(self) -> bytes: ...
    def compute_bitmask(self) -> bytes: ...
    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def validate_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def deep_copy(self) -> SymbolMatcher: ...


def is_end(matcher: SymbolMatcher, symbols: Sequence[int], end: int) -> bool:
    """Return whether the text is complete after `symbols`; `end` is the symbol of the end."""
    if not symbols:
        return matcher.is_accepting()
    return matcher.validate_tokens([*symbols, end]) == len(symbols) + 1


def find_end(
    matcher: SymbolMatcher,
    end: int,
    known: Sequence[Sequence[int]] = (),
    hints: Sequence[Sequence[int]] = (),
    quotes_end: bool = True,
    nodes: int = 400,
    effort: int = 0,
) -> tuple[int, ...] | None:
    """Return symbols after which the text is complete, few of them, or None if none were found.

    Args:
        matcher: the state to start from.
        end: the symbol of the end.
        known: ends of earlier states; often one of them is still right, or right after a few symbols.
        hints: runs of symbols that free text may need before it can end.
        quotes_end: a quote ends free text, as it does in JSON, and is tried before the hints.
        nodes: states to look at, at most, in each of two ways.
        effort: 0 follows the first choice alone; each more tries other choices at one more place.
    """
    for each in known:
        if is_end(matcher, each, end):
            return tuple(each)
    for allowed in (min(nodes, 300), nodes):
        search = _Search(end, known, hints, quotes_end, allowed)
        searched = matcher.deep_copy()  # one that meets a limit cannot be rolled back
        found = search.descend(searched, MAX_SYMBOLS, effort)
        if found is None:
            search = _Search(end, known, hints, quotes_end, allowed)
            found = search.by_levels(matcher)
        if found is not None:
            return found
    return None


@dataclass
class _Search:
    end: int
    known: Sequence[Sequence[int]]
    hints: Sequence[Sequence[int]]
    quotes_end: bool
    nodes: int

    def descend(self, matcher: SymbolMatcher, limit: int, effort: int) -> tuple[int, ...] | None:
        """Take the first choice in every state; with `effort`, others too, at one place after another."""
        taken: list[int] = []
        best: tuple[int, ...] | None = None
        others: list[tuple[int, int]] = []  # (place, symbol)
        while len(taken) <= limit and self.nodes > 0:
            self.nodes -= 1
            if matcher.is_accepting():
                best = tuple(taken)
                break
            joined = next((each for each in self.known if taken and is_end(matcher, each, self.end)), None)
            if joined is not None:
                best = (*taken, *joined)
                break
            step = list(matcher.compute_ff_bytes())
            if not step:
                choices = _choices(matcher, self.quotes_end)
                if not choices:
                    break
                step = self._hint(matcher, choices, taken) or [_varied(choices, taken)]
                if effort and len(choices) <= MAX_STRUCTURE_SYMBOLS:
                    others += [(len(taken), each) for each in choices[1 : 1 + ALTERNATIVES]]
            if not matcher.consume_tokens(step):
                return None
            taken += step
        matcher.rollback(len(taken))
        for place, symbol in others:
            room = limit if best is None else len(best) - place - 2
            step = [*taken[:place], symbol]
            if self.nodes <= 0 or room < 0 or matcher.validate_tokens(step) < len(step):
                continue
            matcher.consume_tokens(step)
            found = self.descend(matcher, room, effort - 1)
            if matcher.is_error():
                return best
            matcher.rollback(len(step))
            if found is not None and (best is None or len(step) + len(found) < len(best)):
                best = (*step, *found)
        return best

    def by_levels(self, matcher: SymbolMatcher) -> tuple[int, ...] | None:
        """Search all texts of one symbol, then of two, and so on; of states with the same next symbols keep a few."""
        level: list[tuple[SymbolMatcher, tuple[int, ...]]] = [(matcher.deep_copy(), ())]
        while level and self.nodes > 0:
            kinds: dict[bytes, int] = {}
            following: list[tuple[SymbolMatcher, tuple[int, ...]]] = []
            for state, taken in level:
                for symbol in _choices(state, self.quotes_end):
                    self.nodes -= 1
                    after = state.deep_copy()
                    if self.nodes <= 0 or not after.consume_tokens([symbol]):
                        continue
                    if after.is_accepting():
                        return (*taken, symbol)
                    kind = after.compute_bitmask()
                    kinds[kind] = kinds.get(kind, 0) + 1
                    if kinds[kind] <= KEPT_OF_A_KIND:
                        following.append((after, (*taken, symbol)))
            level = following
        return None

    def _hint(self, matcher: SymbolMatcher, choices: list[int], taken: list[int]) -> list[int]:
        """Return a hint that may follow, if free text cannot end here; not the same one twice in a row."""
        if len(choices) <= MAX_STRUCTURE_SYMBOLS or (self.quotes_end and choices[0] == QUOTE):
            return []
        for hint in self.hints:
            fresh = taken[-len(hint) :] != list(hint)
            if fresh and matcher.validate_tokens(list(hint)) == len(hint):
                return list(hint)
        return []


def _varied(choices: list[int], taken: list[int]) -> int:
    """Return the first choice, or another where it was taken three times in a row and closes nothing."""
    first = choices[0]
    closes = first in (QUOTE, *b"}]") and len(choices) <= MAX_STRUCTURE_SYMBOLS
    if closes or taken[-3:] != [first] * 3:
        return first
    return choices[len(taken) % len(choices)]


def _choices(matcher: SymbolMatcher, is_json: bool) -> list[int]:
    """Return the symbols that may follow, in the order in which they are tried: in JSON space is the last."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    if len(allowed) > MAX_STRUCTURE_SYMBOLS and QUOTE in allowed:  # a string of JSON: end it
        allowed.remove(QUOTE)
        return [QUOTE, *sorted(allowed, key=_rank)]
    return sorted(allowed, key=_rank if is_json else _rank_in_text)


def _rank_in_text(symbol: int) -> tuple[int, int]:
    return (1, symbol) if symbol < BYTES and symbol in _SPACE else _rank(symbol)


@cache
def _rank(symbol: int) -> tuple[int, int]:
    if symbol >= BYTES:
        return (1, symbol)
    if symbol in _ORDER:
        return (0, _ORDER.index(symbol))
    if symbol in _LAST:
        return (4, _LAST.index(symbol))
    return (2, symbol) if 32 < symbol < 127 else (3, symbol)


class Speller:
    """Spell symbols in as few tokens as possible.

    `tokens` maps the bytes of each token to its id; `controls` maps symbols of control tokens to theirs.
    """

    def __init__(self, tokens: dict[bytes, int], controls: dict[int, int]):
        self.tokens, self.controls = tokens, controls
        self._longest = min(max(map(len, tokens), default=1), 24)
        self.has_every_byte = all(bytes([each]) in tokens for each in range(BYTES))

    def without(self, token_ids: Iterable[int]) -> Speller:
        """Return a speller that does not use these tokens."""
        left = set(token_ids)
        if left.isdisjoint(self.tokens.values()):
            return self
        return Speller({each: id for each, id in self.tokens.items() if id not in left}, self.controls)

    def spell(self, symbols: Sequence[int]) -> tuple[int, ...] | None:
        """Return the fewest tokens that spell `symbols`; None if no tokens do."""
        count = len(symbols)
        best: list[tuple[int, int, int]] = [(0, -1, -1)] * count + [(0, -1, -1)]  # (tokens, token, symbols it takes)
        text = bytes(each if each < BYTES else 0 for each in symbols)
        control = [each >= BYTES for each in symbols]
        for place in range(count - 1, -1, -1):
            options: list[tuple[int, int, int]] = []
            if control[place]:
                if symbols[place] in self.controls and best[place + 1][0] >= 0:
                    options.append((best[place + 1][0] + 1, self.controls[symbols[place]], 1))
            else:
                for length in range(1, min(self._longest, count - place) + 1):
                    if control[place + length - 1]:
                        break
                    token = self.tokens.get(text[place : place + length])
                    if token is not None and best[place + length][0] >= 0:
                        options.append((best[place + length][0] + 1, token, length))
            best[place] = min(options) if options else (-1, -1, 0)
        if best[0][0] < 0:
            return None
        spelt, place = [], 0
        while place < count:
            spelt.append(best[place][1])
            place += best[place][2]
        return tuple(spelt)
