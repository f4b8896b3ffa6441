"""Spell symbols (bytes and control tokens) in as few tokens as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BYTES = 256
MAX_TOKEN_BYTES = 24  # longer tokens are not used


class Speller:
    """Spell symbols in as few tokens as possible.

    `tokens` maps the bytes of each token to its id; `controls` maps symbols of control tokens to theirs.
    """

    def __init__(self, tokens: dict[bytes, int], controls: dict[int, int]):
        self.tokens, self.controls = tokens, controls
        self.longest = min(max(map(len, tokens), default=1), MAX_TOKEN_BYTES)
        self._alone = {each for each in range(BYTES) if bytes([each]) in tokens}.union(controls)

    def without(self, token_ids: Iterable[int]) -> Speller:
        """Return a speller that does not use the given tokens."""
        left = set(token_ids)
        if left.isdisjoint(self.tokens.values()):
            return self
        return Speller({each: id for each, id in self.tokens.items() if id not in left}, self.controls)

    def has_each(self, symbols: Sequence[int]) -> bool:
        """Return whether each symbol has a token of its own, so that `symbols` need at most one token per symbol."""
        return self._alone.issuperset(symbols)

    def spell(self, symbols: Sequence[int]) -> tuple[int, ...] | None:
        """Return the fewest tokens that spell `symbols`; None if no tokens do."""
        spelling = Spelling(self)
        if spelling.count(symbols) is None:
            return None
        spelt, place = [], 0
        while place < len(symbols):
            _, token, length = spelling.best[len(symbols) - place]
            spelt.append(token)
            place += length
        return tuple(spelt)


class Spelling:
    """A count of the fewest tokens that spell a sequence of symbols. When symbols are added or removed at its
    beginning, results for the rest are reused.

    `best[n]` is (number of tokens, the first token, its number of symbols) for the last n symbols; -1 tokens if none
    spell them.
    """

    def __init__(self, speller: Speller):
        self._speller = speller
        self._symbols: tuple[int, ...] = ()
        self.best: list[tuple[int, int, int]] = [(0, -1, 0)]

    def count(self, symbols: Sequence[int]) -> int | None:
        """Return the smallest number of tokens that spell `symbols`; None if no tokens do."""
        self._extend(tuple(symbols))
        count = self.best[len(symbols)][0]
        return None if count < 0 else count

    def first(self, symbols: Sequence[int]) -> int | None:
        """Return the first of the fewest tokens that spell `symbols`; None if there are no symbols, or no tokens spell
        them.
        """
        self._extend(tuple(symbols))
        token = self.best[len(symbols)][1]
        return None if token < 0 else token

    def _extend(self, symbols: tuple[int, ...]) -> None:
        """Drop the entries of removed symbols, and add the new symbols, from the end."""
        count = len(symbols)
        same, most = 0, min(count, len(self._symbols))
        while same < most:  # the length of the common suffix, by bisection
            middle = (same + most + 1) // 2
            if symbols[count - middle :] == self._symbols[len(self._symbols) - middle :]:
                same = middle
            else:
                most = middle - 1
        del self.best[same + 1 :]
        self._symbols = symbols
        self.best += [(-1, -1, 0)] * (count - same)
        for left in range(same + 1, count + 1):
            self.best[left] = self._best(symbols, count - left, left)

    def _best(self, symbols: tuple[int, ...], place: int, left: int) -> tuple[int, int, int]:
        tokens, controls, best = self._speller.tokens, self._speller.controls, self.best
        options: list[tuple[int, int, int]] = []
        if symbols[place] >= BYTES:
            if symbols[place] in controls and best[left - 1][0] >= 0:
                options.append((best[left - 1][0] + 1, controls[symbols[place]], 1))
        else:
            run = symbols[place : place + self._speller.longest]
            until = next((length for length, each in enumerate(run) if each >= BYTES), len(run))
            text = bytes(run[:until])
            for length in range(1, until + 1):
                token = tokens.get(text[:length])
                if token is not None and best[left - length][0] >= 0:
                    options.append((best[left - length][0] + 1, token, length))
        return min(options) if options else (-1, -1, 0)
