"""Propose what followed the same tokens earlier in the text (prompt lookup, Saxena 2023). Integers only."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.request import Sequence
from workbench.sampling.verify import Draft


@dataclass
class LookupDrafts:
    """Propose from the latest earlier occurrence of the longest run of last tokens, of `max_ngram` down to
    `min_ngram` tokens."""

    least: int
    most: int
    _seen: dict[str, _Seen] = field(default_factory=dict, repr=False)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def _draft(self, sequence: Sequence, count: int) -> Draft:
        ids = sequence.token_ids
        seen = self._seen.setdefault(sequence.request_id, _Seen())
        seen.read(ids, self.least, self.most)
        for length in range(min(self.most, len(ids) - 1), self.least - 1, -1):
            place = seen.after.get(tuple(ids[-length:]))
            if place is not None:
                period = len(ids) - place  # what is copied may run on into the copy itself
                return Draft(tuple(ids[place + i % period] for i in range(count)))
        return Draft()


@dataclass
class _Seen:
    """The position after the latest occurrence of each n-gram, except those that end with the text's last token."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    known: int = 0  # places up to here are entered

    def read(self, ids: list[int], least: int, most: int) -> None:
        for place in range(self.known + 1, len(ids)):
            for length in range(least, min(most, place) + 1):
                self.after[tuple(ids[place - length : place])] = place
        self.known = max(self.known, len(ids) - 1)
