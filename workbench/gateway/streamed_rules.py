"""Find matches of moderation rules in a streamed text, and release only text that cannot become part of a match.

    text      | ...... released ...... | may begin a match | to come ...
    positions 0                     released             length

A partial match of the library `regex` gives the position at the end of a text where a match may begin.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from os.path import commonprefix
from typing import NamedTuple

import regex

from workbench.errors import WorkbenchError

MAX_CONTEXT = 4_096  # characters kept before the held text, for anchors and boundaries
OUTSIDE_WORDS = r"(?:(?<!\w)|(?!\w))"  # not between two characters of one word
END_OF_WORD = r"(?:(?<!\w)|(?=\W))"  # the same, but at the end of an unfinished text only after a whole word
# Assertions on following text, and look-around; escaped text, sets and comments are skipped.
PASSED_OVER = r"|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?\#[^)]*\)"
ASSERTIONS = re.compile(r"(\\[bBmM]|\$)" + PASSED_OVER, re.DOTALL)
LOOK_AROUND = re.compile(r"(\(\?<?[=!])" + PASSED_OVER, re.DOTALL)
AFTER = r"(?=(?s:..))"  # characters that assertions read: `$` reads a line feed and one more character


class Match(NamedTuple):
    """A match in a text: its start position, and the rule that matches."""

    start: int
    rule: str


@dataclass(frozen=True)
class RulePattern:
    """The compiled pattern of a rule.

    Args:
        rule: the rule's name.
        ended: finds a match in a complete text.
        open: finds a match in an unfinished text that holds for every continuation, or a partial match.
        max_held: maximum number of characters held back for a partial match.
        ignores_case: whether it is searched in the case-folded text.
    """

    rule: str
    ended: regex.Pattern[str]
    open: regex.Pattern[str]
    max_held: int
    ignores_case: bool = False

    @classmethod
    def of_terms(cls, rule: str, terms: Collection[str], whole_words: bool) -> RulePattern:
        """Return the case-insensitive pattern of terms.

        With `whole_words` a term only matches if no letter or digit before or after it continues its word.
        """
        source = any_of({fold(each) for each in terms})
        begin, end, end_or_more = (OUTSIDE_WORDS, OUTSIDE_WORDS, END_OF_WORD) if whole_words else ("", "", "")
        ended, going_on = (regex.compile(f"{begin}(?:{source}){each}") for each in (end, end_or_more))
        return cls(rule, ended, going_on, max(map(len, terms)), ignores_case=True)

    @classmethod
    def of_regex(cls, rule: str, source: str, max_held: int) -> RulePattern:
        """Return the pattern of a regular expression.

        Raises:
            WorkbenchError: if it is invalid, matches the empty text, or looks further ahead than a word boundary.
        """
        where = f"moderation rule {rule!r}: {source!r}"
        # In an unfinished text an assertion at its end may still become true, so a match must include the following
        # text.
        may_hold = ASSERTIONS.sub(lambda found: rf"(?:{found[0]}|\Z)" if found[1] else found[0], source)
        try:
            ended = regex.compile(source)
            line = "\n" if ended.flags & regex.VERBOSE else ""  # the line feed ends a comment in the last line
            going_on = regex.compile(f"(?:{may_hold}{line}){AFTER}")
        except (regex.error, RecursionError, OverflowError) as error:
            raise WorkbenchError(f"{where} is not a regular expression: {error}") from None
        if ended.match(""):
            raise WorkbenchError(f"{where} matches the empty text, and so every answer: require a character")
        if any(found[1] for found in LOOK_AROUND.finditer(source)):
            raise WorkbenchError(f"{where} looks ahead or behind, and streams are checked in pieces: leave (?=...) out")
        return cls(rule, ended, going_on, max_held)


class StreamedText:
    """The received text of one channel of an answer."""

    def __init__(self, patterns: Sequence[RulePattern]):
        self._patterns = patterns
        self._undecided = [0] * len(patterns)  # by pattern: position before which no match begins
        self._text = self._folded = ""  # text from position `_offset` on, original and case-folded
        self._offset = self._released = 0

    @property
    def length(self) -> int:
        return self._offset + len(self._text)

    @property
    def text(self) -> str:
        """Return the end of the text as far as it is stored; it includes all held-back text."""
        return self._text

    def feed(self, text: str, is_all: bool = False) -> tuple[int, Match | None]:
        """Add text; return the position up to which the text may be released, and the match of a rule that ends it, if
        any.

        With `is_all` the text is complete and nothing is held back.
        """
        self._text, self._folded = self._text + text, self._folded + fold(text)
        limit, matches = self.length, []
        for number, pattern in enumerate(self._patterns):
            known, begin = self._folded if pattern.ignores_case else self._text, self._undecided[number] - self._offset
            found = pattern.open.search(known, begin, partial=True)
            self._undecided[number] = self.length if found is None else self._offset + found.start()
            if is_all and (found is None or found.partial):
                found = pattern.ended.search(known, begin)
            if found is not None and not found.partial:
                matches.append(Match(self._offset + found.start(), pattern.rule))
            elif not is_all:
                limit = min(limit, max(self._undecided[number], self.length - pattern.max_held))
        match = min(matches, default=None)
        self._released = max(self._released, limit if match is None else match.start)
        surplus = self._released - self._offset - MAX_CONTEXT
        if surplus > MAX_CONTEXT:
            self._text, self._folded = self._text[surplus:], self._folded[surplus:]
            self._offset += surplus
            self._undecided = [max(each, self._offset + 1) for each in self._undecided]  # `^` only matches at 0
        return self._released, match


def any_of(terms: Collection[str]) -> str:
    """Return a regular expression that matches any of the terms; common prefixes are merged for speed."""
    branches = []
    for _, group in groupby(sorted(terms), lambda term: term[:1]):
        alike = list(group)
        begin = commonprefix(alike)
        rest = [term.removeprefix(begin) for term in alike]
        branches.append(regex.escape(begin) + (f"(?:{any_of(rest)})" if any(rest) else ""))
    return "|".join(branches)


def fold(text: str) -> str:
    """Case-fold a text without changing its length, so that positions stay."""
    folded = text.casefold()
    if len(folded) == len(text):
        return folded
    return text.lower()[:1] if len(text) == 1 else "".join(map(fold, text))
