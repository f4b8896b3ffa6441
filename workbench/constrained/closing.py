"""Find a short completion of a partial text under a grammar: required content, closing quotes and brackets.

The grammar is walked in symbols (bytes and control tokens), independent of the vocabulary. A search leaves its matcher
unchanged. It can run in parts, measured in visited states of about 25 us each.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from workbench.constrained.spelling import BYTES

QUOTE = 34
CONTROL_TOKEN = re.compile(rb"\xff\[(\d+)\]")
MAX_SYMBOLS = 20_000  # symbols of a completion
MAX_STRUCTURE_SYMBOLS = 64  # a state that allows more symbols is within free text
KEPT_OF_A_KIND = 3  # states kept per level with equal next symbols
ALTERNATIVES = 4
FIRST_NODES = 300  # states visited by a search's first attempt
SYMBOLS_PER_NODE = 64  # symbols checked in the time of one visited state

# Closing symbols come first: brackets and separators, then symbols that begin a value, space last.
_ORDER = b'}]",:@.)>/0123456789-ntf'
_SPACE = b" \n\r\t"
_LAST = b"[{(" + _SPACE + b"\\"


class SymbolMatcher(Protocol):
    """The interface of an llguidance matcher whose tokens are symbols: the methods that a search uses."""

    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...
    def compute_ff_bytes(self) -> bytes: ...
    def compute_bitmask(self) -> bytes: ...
    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def validate_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def deep_copy(self) -> SymbolMatcher: ...


def is_end(matcher: SymbolMatcher, symbols: Sequence[int], end: int) -> bool:
    """Return whether the text is complete after `symbols`; `end` is the symbol that ends a text."""
    if not symbols:
        return matcher.is_accepting()
    return matcher.validate_tokens([*symbols, end]) == len(symbols) + 1


class NodeBudget:
    """The number of states that searches may still visit; several searches may share one budget."""

    def __init__(self, nodes: int):
        self.left = nodes


class EndSearch:
    """A search for symbols that complete a text. Once `done`, `way` has the symbols, or None if none were found.

    Args:
        matcher: the start state. After the first `run`, call `keep_state` before it changes.
        end: the symbol of the end.
        known_ends: completions of earlier states; often one is still valid, at once or after a few symbols.
        hints: sequences of symbols that free text may need before it can end.
        quotes_end: whether a quote ends free text, as in JSON; a quote is then tried before the hints.
        nodes: maximum number of states visited by each of the two strategies (descent, levels).
        effort: number of places at which choices other than the first are tried; 0: only first choices.
    """

    def __init__(
        self,
        matcher: SymbolMatcher,
        end: int,
        known_ends: Sequence[Sequence[int]] = (),
        hints: Sequence[Sequence[int]] = (),
        quotes_end: bool = True,
        nodes: int = 1000,
        effort: int = 0,
    ):
        self._matcher, self._end = matcher, end
        self._known_ends, self._hints = known_ends, hints
        self._quotes_end, self._nodes, self._effort = quotes_end, nodes, effort
        self._search = self._looked_at()
        self.done = False
        self.way: tuple[int, ...] | None = None

    def run(self, budget: NodeBudget | None = None) -> bool:
        """Continue the search until it has ended or `budget` is spent; return whether it has ended."""
        while not self.done and (budget is None or budget.left > 0):
            try:
                cost = next(self._search)
            except StopIteration as ended:
                self.done, self.way = True, ended.value
            else:
                if budget is not None:
                    budget.left -= cost
        return self.done

    def keep_state(self) -> None:
        """Continue with a copy of the matcher, so that the original may change."""
        self._matcher = self._matcher.deep_copy()

    def _looked_at(self) -> Generator[int, None, tuple[int, ...] | None]:
        """Search; yield the cost of each part, in states, and return the completion."""
        for each in self._known_ends:
            if is_end(self._matcher, each, self._end):
                return tuple(each)
            yield 1 + len(each) // SYMBOLS_PER_NODE
        for allowed in (min(self._nodes, FIRST_NODES), self._nodes):
            descent = _Attempt(self._end, self._known_ends, self._hints, self._quotes_end, allowed)
            searched = self._matcher.deep_copy()  # a matcher that reaches a limit cannot be rolled back
            way = yield from descent.descend(searched, MAX_SYMBOLS, self._effort)
            if way is None:
                levels = _Attempt(self._end, self._known_ends, self._hints, self._quotes_end, allowed)
                way = yield from levels.by_levels(self._matcher)
            if way is not None:
                return way
        return None


@dataclass
class _Attempt:
    end: int
    known_ends: Sequence[Sequence[int]]
    hints: Sequence[Sequence[int]]
    quotes_end: bool
    nodes: int

    def descend(self, matcher: SymbolMatcher, limit: int, effort: int) -> Generator[int, None, tuple[int, ...] | None]:
        """Take the first choice in every state; with `effort`, also try other choices, place by place."""
        taken: list[int] = []
        best: tuple[int, ...] | None = None
        others: list[tuple[int, int]] = []  # (place, symbol)
        while len(taken) <= limit and self.nodes > 0:
            self.nodes -= 1
            yield 1
            if matcher.is_accepting():
                best = tuple(taken)
                break
            joined = next((each for each in self.known_ends if taken and is_end(matcher, each, self.end)), None)
            if joined is not None:
                best = (*taken, *joined)
                break
            step = _forced(matcher)
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
            way = yield from self.descend(matcher, room, effort - 1)
            if matcher.is_error():
                return best
            matcher.rollback(len(step))
            if way is not None and (best is None or len(step) + len(way) < len(best)):
                best = (*step, *way)
        return best

    def by_levels(self, matcher: SymbolMatcher) -> Generator[int, None, tuple[int, ...] | None]:
        """Search breadth-first, by number of symbols; keep only a few states with equal next symbols."""
        level: list[tuple[SymbolMatcher, tuple[int, ...]]] = [(matcher.deep_copy(), ())]
        while level and self.nodes > 0:
            kinds: dict[bytes, int] = {}
            following: list[tuple[SymbolMatcher, tuple[int, ...]]] = []
            for state, taken in level:
                for symbol in _choices(state, self.quotes_end):
                    self.nodes -= 1
                    yield 1
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
        """Return a legal hint if free text cannot end here; never the same hint twice in a row."""
        if len(choices) <= MAX_STRUCTURE_SYMBOLS or (self.quotes_end and choices[0] == QUOTE):
            return []
        for hint in self.hints:
            fresh = taken[-len(hint) :] != list(hint)
            if fresh and matcher.validate_tokens(list(hint)) == len(hint):
                return list(hint)
        return []


def _forced(matcher: SymbolMatcher) -> list[int]:
    """Return the forced next symbols. llguidance encodes a control token among bytes as 0xFF and its number."""
    symbols: list[int] = []
    for place, part in enumerate(CONTROL_TOKEN.split(matcher.compute_ff_bytes())):
        symbols += [int(part)] if place % 2 else part
    return symbols


def _varied(choices: list[int], taken: list[int]) -> int:
    """Return the first choice, or another one if it was taken three times in a row and closes nothing."""
    first = choices[0]
    closes = first in (QUOTE, *b"}]") and len(choices) <= MAX_STRUCTURE_SYMBOLS
    if closes or taken[-3:] != [first] * 3:
        return first
    return choices[len(taken) % len(choices)]


def _choices(matcher: SymbolMatcher, is_json: bool) -> list[int]:
    """Return the allowed next symbols in the order of trial; space comes last in JSON."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    if len(allowed) > MAX_STRUCTURE_SYMBOLS and QUOTE in allowed:  # within a JSON string: end it
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
