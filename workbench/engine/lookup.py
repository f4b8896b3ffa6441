"""Propose what followed the same tokens earlier in the text (prompt lookup, Saxena 2023). Integers only."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.request import Sequence
from workbench.sampling.verify import Draft


@dataclass
class PromptLookupProposer:
    """Propose from the latest earlier occurrence of the longest run of last tokens, of `max_ngram` down to
    `min_ngram` tokens."""

    min_ngram: int
    max_ngram: int
    _seen: dict[str, _NgramIndex] = field(default_factory=dict, repr=False)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def _draft(self, sequence: Sequence, count: int) -> Draft:
        ids = sequence.token_ids
        seen = self._seen.setdefault(sequence.request_id, _NgramIndex())
        seen.extend(ids, self.min_ngram, self.max_ngram)
        for length in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            place = seen.after.get(tuple(ids[-length:]))
            if place is not None:
                period = len(ids) - place  # what is copied may run on into the copy itself
                return Draft(tuple(ids[place + i % period] for i in range(count)))
        return Draft()


@dataclass
class _NgramIndex:
    """The position after the latest occurrence of each n-gram, except those that end with the text's last token."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    known: int = 0  # places up to here are entered

    def extend(self, ids: list[int], min_ngram: int, max_ngram: int) -> None:
        for place in range(self.known + 1, len(ids)):
            for length in range(min_ngram, min(max_ngram, place) + 1):
                self.after[tuple(ids[place - length : place])] = place
        self.known = max(self.known, len(ids) - 1)
