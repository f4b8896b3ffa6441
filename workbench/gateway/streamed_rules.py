"""Find what rules forbid in a text that comes piece by piece, and let out only what is decided.

    text      | ........ left ........ | may begin a match | to come ...
    positions 0                     released             length

Terms are followed by an automaton (Aho and Corasick, 1975), whose state says exactly how much of the end may begin a
term. Of a regular expression, as many characters are held back as its longest match has.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from re import _constants as opcodes  # type: ignore[attr-defined] (typeshed lacks the parser of re)
from re import _parser as parser  # type: ignore[attr-defined] (typeshed lacks the parser of re)
from typing import Any

from workbench.errors import WorkbenchError

MAX_CONTEXT = 4_096  # characters that are kept before the held ones, for anchors and what looks behind
# What a pattern may look at after its match: a word's end needs one character, `$` a line feed and one more.
CHARACTERS_AFTER = 2


@dataclass(frozen=True)
class Match:
    """A rule, and where it matched: characters [start, end) of the text."""

    rule: str
    start: int
    end: int


class TermAutomaton:
    """Terms of several rules, without regard to case.

    Args:
        terms: (name of the rule, term).
        whole_words: whether a letter or digit before or after it makes a term no match.
    """

    def __init__(self, terms: Iterable[tuple[str, str]], whole_words: bool):
        self.whole_words = whole_words
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self._ends: list[list[tuple[str, int]]] = [[]]  # (rule, length) of the terms that end in a state
        for rule, term in terms:
            self._add(rule, "".join(map(fold, term)))
        self._link()

    def _add(self, rule: str, term: str) -> None:
        state = 0
        for character in term:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self._ends.append([])
            state = self._next[state][character]
        self._ends[state].append((rule, len(term)))

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, target in self._next[state].items():
                self._fail[target] = self.step(self._fail[state], character)
                queue.append(target)

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def shorter(self, state: int) -> int:
        """Return the state of the longest shorter end that begins a term."""
        return self._fail[state]

    def terms_at(self, state: int) -> list[tuple[str, int]]:
        """Return (rule, length) of every term that ends here."""
        found = []
        while state:
            found += self._ends[state]
            state = self._fail[state]
        return found


@dataclass(frozen=True)
class BoundedPattern:
    """A regular expression and the largest number of characters of a match that is found for certain."""

    rule: str
    pattern: re.Pattern[str]
    width: int
    looks_ahead: bool

    @classmethod
    def parse(cls, rule: str, regex: str, max_width: int) -> BoundedPattern:
        """Compile a regular expression.

        Matches longer than `max_width` characters, where it allows them, may be found late.

        Raises:
            WorkbenchError: where it is none, matches the empty text, or looks further ahead than a boundary of words.
        """
        where = f"moderation rule {rule!r}: {regex!r}"
        try:
            compiled = re.compile(regex)
            tree = parser.parse(regex)
        except (re.error, RecursionError, OverflowError) as error:
            raise WorkbenchError(f"{where} is no regular expression: {error}") from None
        if compiled.match(""):
            raise WorkbenchError(f"{where} matches the empty text, so every answer: require a character")
        kinds = set(_operations(tree))
        if kinds & {opcodes.ASSERT, opcodes.ASSERT_NOT}:
            raise WorkbenchError(f"{where} looks ahead or behind, and streams are decided at once: leave (?=...) out")
        return cls(rule, compiled, min(tree.getwidth()[1], max_width), opcodes.AT in kinds)

    def find(self, text: str, first: int, is_all: bool) -> tuple[Match | None, int]:
        """Return the first certain match in `text` from `first` on, and up to where it is certain that none begins."""
        begin = first
        margin = CHARACTERS_AFTER if self.looks_ahead and not is_all else 0
        undecided = len(text)
        while (found := self.pattern.search(text, begin)) is not None:
            if found.end() + margin <= len(text):
                return Match(self.rule, *found.span()), undecided
            undecided = min(undecided, found.start())  # what comes may yet make it no match, or a longer one
            begin = found.start() + 1
        return None, len(text) if is_all else min(undecided, max(first, len(text) - (self.width - 1) - margin))


class StreamedText:
    """The text of one channel of an answer, as far as it came.

    Args:
        automata: terms.
        patterns: regular expressions.
    """

    def __init__(self, automata: Sequence[TermAutomaton], patterns: Sequence[BoundedPattern]):
        self._automata, self._patterns = automata, patterns
        self._states = [0] * len(automata)
        self._ending: list[list[Match]] = [[] for _ in automata]  # matches, if what follows ends their last word
        self._longest = max([each.width for each in patterns] + [max(each.depth) for each in automata], default=0)
        self._text = ""  # from position `_offset` on
        self._offset = 0
        self._released = 0

    @property
    def length(self) -> int:
        return self._offset + len(self._text)

    @property
    def text(self) -> str:
        """Return the end of the text: at least what is held back."""
        return self._text

    def feed(self, text: str, is_all: bool = False) -> tuple[int, Match | None]:
        """Take more text; return the position up to which all of it may leave, and the match that ends it, if any.

        With `is_all` nothing follows that belongs to it, so that nothing is held back.
        """
        first, self._text = self.length, self._text + text
        matches = [each for number in range(len(self._automata)) for each in self._terms(number, first, is_all)]
        limit = self.length
        if not is_all:
            limit = min([limit, *(self._may_begin(number) for number in range(len(self._automata)))])
        for pattern in self._patterns:
            begin = max(0, self._released - self._offset - pattern.width + 1)
            found, decided = pattern.find(self._text, begin, is_all)
            limit = min(limit, decided + self._offset)
            if found is not None:
                matches.append(Match(found.rule, found.start + self._offset, found.end + self._offset))
        match = min(matches, key=lambda each: (each.start, each.end, each.rule), default=None)
        self._released = max(self._released, limit if match is None else match.start)
        surplus = self._released - self._offset - self._longest - MAX_CONTEXT
        if surplus > MAX_CONTEXT:
            self._text, self._offset = self._text[surplus:], self._offset + surplus
        return self._released, match

    def _terms(self, number: int, first: int, is_all: bool) -> list[Match]:
        automaton, state, ending = self._automata[number], self._states[number], self._ending[number]
        found: list[Match] = []
        for position, character in enumerate(self._text[first - self._offset :], first + 1):
            if not _is_word(character):
                found += ending
            ending = []
            state = automaton.step(state, fold(character))
            for rule, length in automaton.terms_at(state):
                match = Match(rule, position - length, position)
                if not automaton.whole_words or not _is_word(character):
                    found += [match] if self._may_start(automaton, match.start) else []
                elif self._may_start(automaton, match.start):
                    ending.append(match)
        if is_all:
            found, ending = found + ending, []
        self._states[number], self._ending[number] = state, ending
        return found

    def _may_begin(self, number: int) -> int:
        """Return where the longest end begins that may become a term."""
        automaton, state = self._automata[number], self._states[number]
        while state and not self._may_start(automaton, self.length - automaton.depth[state]):
            state = automaton.shorter(state)
        return min([self.length - automaton.depth[state], *(each.start for each in self._ending[number])])

    def _may_start(self, automaton: TermAutomaton, position: int) -> bool:
        """Return whether a term may start here: not within a word, where only whole words count."""
        at = position - self._offset
        return not automaton.whole_words or at <= 0 or not (_is_word(self._text[at - 1]) and _is_word(self._text[at]))


def fold(character: str) -> str:
    """Return a character without its case, always as one character, so that positions stay."""
    folded = character.casefold()
    return folded if len(folded) == 1 else character.lower()[:1]


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _operations(tree: Any) -> Iterable[object]:
    if isinstance(tree, parser.SubPattern | list | tuple):
        for each in tree:
            if isinstance(each, tuple) and each:
                yield each[0]
            yield from _operations(each)
