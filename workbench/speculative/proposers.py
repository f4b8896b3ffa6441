"""Propose tokens to verify, and decide how many. Prompt lookup (Saxena 2023) proposes what followed the same tokens
earlier in the text."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, Protocol

from workbench.request import Sequence
from workbench.sampling.verify import Draft


class Proposer(Protocol):
    """A proposer of up to `counts` tokens for each sequence. It may keep state per request until `forget`.

    Proposals are free: the target's output stays what it is, whatever is proposed.
    """

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]: ...

    def forget(self, request_id: str) -> None: ...


@dataclass
class Speculator:
    """The speculator of a runner: `proposer` chooses tokens, this class their number.

    The number is `num_speculative_tokens`, adapted to acceptance if `length` is adaptive, and never more than the
    request can use.
    """

    proposer: Proposer
    num_speculative_tokens: int
    max_model_len: int
    length: Literal["fixed", "adaptive"] = "fixed"
    accept: Literal["rejection", "match"] = "rejection"
    _lengths: dict[str, int] = field(default_factory=dict, repr=False)
    _known: dict[str, Sequence] = field(default_factory=dict, repr=False)

    def propose(self, running: Iterable[Sequence]) -> dict[str, Draft]:
        """Return a draft for each decoding sequence that has one."""
        self._sweep()
        asked = [sequence for sequence in running if self._count(sequence) > 0]
        if not asked:
            return {}
        self._known.update((sequence.request_id, sequence) for sequence in asked)
        drafts = self.proposer.propose(asked, [self._count(sequence) for sequence in asked])
        return {sequence.request_id: draft for sequence, draft in zip(asked, drafts, strict=True) if len(draft)}

    def record_acceptance(self, request_id: str, drafted: int, accepted: int) -> None:
        """Record how many draft tokens of a sequence were accepted."""
        if self.length == "adaptive":
            change = 2 if accepted == drafted else -1
            self._lengths[request_id] = min(
                self.num_speculative_tokens, max(1, self._lengths.get(request_id, self.num_speculative_tokens) + change)
            )

    def _count(self, sequence: Sequence) -> int:
        if not sequence.is_decoding or sequence.beams:
            return 0
        # The token after the draft needs a position too.
        left = sequence.request.sampling.max_output_tokens - (len(sequence.token_ids) - sequence.prompt_length)
        room = min(left, self.max_model_len - len(sequence.token_ids)) - 1
        return min(self._lengths.get(sequence.request_id, self.num_speculative_tokens), room)

    def clear(self) -> None:
        """Forget every sequence; unfinished ones start anew."""
        self._forget(list(self._known))

    def _sweep(self) -> None:
        self._forget([name for name, sequence in self._known.items() if sequence.finish_reason is not None])

    def _forget(self, names: list[str]) -> None:
        for name in names:
            del self._known[name]
            self._lengths.pop(name, None)
            self.proposer.forget(name)


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
