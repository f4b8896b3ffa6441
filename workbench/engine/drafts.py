"""Tokens proposed for what comes next: who proposes them, and how many."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, Protocol

from workbench.request import Sequence
from workbench.sampling.verify import Draft


class Proposer(Protocol):
    """Proposes up to so many tokens for what follows each sequence, and may keep something for each until it is told to
    forget it. Proposals are free: whatever is proposed, the target's output stays what it is."""

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]: ...

    def forget(self, request_id: str) -> None: ...


@dataclass
class Drafts:
    """What a runner proposes: `proposer` says which tokens, this says how many: `most`, adapted to what stood if
    `length` is adaptive (see `speculation`), and never more than the request can still use."""

    proposer: Proposer
    most: int
    context: int
    length: Literal["fixed", "adaptive"] = "fixed"
    accept: Literal["rejection", "match"] = "rejection"
    _lengths: dict[str, int] = field(default_factory=dict, repr=False)
    _known: dict[str, Sequence] = field(default_factory=dict, repr=False)

    def propose(self, running: Iterable[Sequence]) -> dict[str, Draft]:
        """A draft for each sequence that decodes, where there is one."""
        self._sweep()
        asked = [sequence for sequence in running if self._count(sequence) > 0]
        if not asked:
            return {}
        self._known.update((sequence.request_id, sequence) for sequence in asked)
        drafts = self.proposer.propose(asked, [self._count(sequence) for sequence in asked])
        return {sequence.request_id: draft for sequence, draft in zip(asked, drafts, strict=True) if len(draft)}

    def checked(self, request_id: str, drafted: int, accepted: int) -> None:
        """So many of a sequence's drafted tokens stand."""
        if self.length == "adaptive":
            change = 2 if accepted == drafted else -1
            self._lengths[request_id] = min(self.most, max(1, self._lengths.get(request_id, self.most) + change))

    def _count(self, sequence: Sequence) -> int:
        if sequence.waiting_tokens != 1 or sequence.computed < sequence.prompt_length or sequence.mates:
            return 0
        # The token after the drafted ones needs a place too.
        left = sequence.request.sampling.max_tokens - (len(sequence.token_ids) - sequence.prompt_length)
        room = min(left, self.context - len(sequence.token_ids)) - 1
        return min(self._lengths.get(sequence.request_id, self.most), room)

    def clear(self) -> None:
        """Forget every sequence; for those that go on, all begins anew."""
        self._forget(list(self._known))

    def _sweep(self) -> None:
        self._forget([name for name, sequence in self._known.items() if sequence.finish_reason is not None])

    def _forget(self, names: list[str]) -> None:
        for name in names:
            del self._known[name]
            self._lengths.pop(name, None)
            self.proposer.forget(name)
