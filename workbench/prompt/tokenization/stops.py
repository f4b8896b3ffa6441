"""Find stop strings in a text that arrives in pieces (Knuth, Morris and Pratt, 1977, one search per stop string)."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Iterable

from workbench.errors import WorkbenchError


class StopStringSearch:
    """A search for stop strings that holds back only the end of the text that may start one.

    The search ends with the first piece that completes a stop string. The earliest start wins; among equal starts the
    shortest stop string wins. Memory is bounded by the matched part of the stop strings.
    """

    def __init__(self, stops: Iterable[str]):
        self.matched_stop: str | None = None
        self._held: deque[str] = deque()  # pieces, joined only where they are shown
        self._count = 0  # characters in them
        self._begun: list[_PartialMatch] = []
        for stop in dict.fromkeys(stops):
            if not stop:
                raise WorkbenchError("stop: a stop string must not be empty; leave it out")
            self._begun.append(_PartialMatch(stop))
        first = "".join(re.escape(begun.stop[0]) for begun in self._begun)
        self._first = re.compile(f"[{first}]").search if first else _never  # where a stop string may begin

    def push(self, piece: str) -> str:
        """Take the next piece of text; return the text that may be shown now, which ends right before the first stop
        string.
        """
        if self.matched_stop is not None or not piece:
            return ""
        if not self._held and self._first(piece) is None:
            return piece
        before, self._count = self._count, self._count + len(piece)
        self._held.append(piece)
        matches: list[tuple[int, int, str]] = []
        for begun in self._begun:
            end = begun.advance(piece)
            if end is not None:
                matches.append((before + end - len(begun.stop), len(begun.stop), begun.stop))
        if not matches:
            return self._release(self._count - max(begun.length for begun in self._begun))
        start, _, self.matched_stop = min(matches)
        shown = self._release(start)
        self._held.clear()
        return shown

    def finish(self) -> str:
        """Return the held-back text at the end."""
        for begun in self._begun:
            begun.length = 0
        return "" if self.matched_stop is not None else self._release(self._count)

    def _release(self, count: int) -> str:
        """Return the first `count` held-back characters."""
        self._count -= count
        shown: list[str] = []
        while count:
            piece = self._held.popleft()
            if len(piece) > count:
                self._held.appendleft(piece[count:])
            shown.append(piece[:count])
            count -= len(shown[-1])
        return "".join(shown)


class _PartialMatch:
    """The length of the stop string's prefix that the text ends with."""

    def __init__(self, stop: str):
        self.stop, self.length = stop, 0
        self._back = array("l", (0, 0))  # by match length: longest prefix that is also a suffix

    def advance(self, piece: str) -> int | None:
        """Advance by `piece`; return the end of the completed stop string in it, or None."""
        stop, length, at = self.stop, self.length, 0
        while at < len(piece):
            if not length:
                at = piece.find(stop[0], at)
                if at < 0:
                    break
            fits = min(len(piece) - at, len(stop) - length)
            if piece.startswith(stop[length : length + fits], at):
                at, length = at + fits, length + fits
            elif stop[length] == piece[at]:
                at, length = at + 1, length + 1
            elif length:
                length = self._shorter(length)
            else:
                at += 1
            if length == len(stop):
                return at
        self.length = length
        return None

    def _shorter(self, length: int) -> int:
        """Return the longest shorter prefix that the first `length` characters end with."""
        stop, back = self.stop, self._back
        while len(back) <= length:
            matched, longest = len(back) - 1, back[-1]
            while longest and stop[longest] != stop[matched]:
                longest = back[longest]
            back.append(longest + (stop[longest] == stop[matched]))
        return back[length]


def _never(piece: str) -> None:
    return None
