"""Hold the scheduler's decisions for one step: spans to compute, page transfers, and reasons. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.cache.moves import Moves
from workbench.cache.pages import NULL_PAGE
from workbench.engine.policy import Wishes
from workbench.request import Sequence
from workbench.shown import Shown, Table


class Span(NamedTuple):
    """Consecutive tokens of one sequence that this step computes: positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    samples: bool  # whether the last token's logits are needed: all known tokens are computed then
    scored: int | None = None  # last tokens whose logits are needed; None: one if it samples, else none
    drafts: tuple[int, ...] = ()  # its last tokens, if they are proposed rather than known

    @classmethod
    def of(cls, sequence: Sequence, length: int) -> Span:
        """Return the span of the next `length` tokens of `sequence`."""
        return cls(sequence, sequence.computed, length, samples=length == sequence.waiting_tokens)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def logit_rows(self) -> int:
        return int(self.samples) + len(self.drafts) if self.scored is None else self.scored

    @property
    def decodes(self) -> bool:
        """Return whether it computes one generated token and its draft tokens; everything else is prefill."""
        return self.length == 1 + len(self.drafts) and self.start >= self.sequence.prompt_length

    @property
    def ids(self) -> list[int]:
        return [*self.sequence.token_ids[self.start : self.end - len(self.drafts)], *self.drafts]

    @property
    def told(self) -> tuple[object, ...]:
        """Return cells of a table: request, tokens, kind, draft tokens, logits, and pages held now by cache group."""
        kind = "check" if self.drafts else "decode" if self.decodes else "prefill"
        where = str(self.start) if self.length == 1 else f"{self.start} - {self.end - 1}"
        held = ", ".join(str(sum(page != NULL_PAGE for page in pages)) for pages in self.sequence.pages)
        return self.sequence.request_id, where, kind, len(self.drafts) or "", self.logit_rows or "", held

    def rows(self) -> list[Span]:
        """Return a decode and its draft tokens as spans of one token; each reads what the spans before it write."""
        rows = enumerate(self.drafts, self.start + 1)
        return [
            Span(self.sequence, self.start, 1, self.samples),
            *(Span(self.sequence, at, 1, True, scored=1, drafts=(token,)) for at, token in rows),
        ]


@dataclass(frozen=True)
class Decision:
    """The reason for an action on a request: admitted, waiting, cut, evicted, preempted or refused_decision."""

    request_id: str
    action: str
    reason: str


@dataclass(frozen=True)
class StepPlan(Shown):
    """Spans to compute, decodes (length 1) first, and the decisions that led to them."""

    step: int
    spans: tuple[Span, ...]
    decisions: tuple[Decision, ...] = ()
    moves: Moves = field(default_factory=Moves)  # before anything is computed
    faults: tuple[tuple[Sequence, str], ...] = ()  # sequences to fail, with their errors
    padding: int = 0  # rows of a padded batch without a sequence
    wishes: tuple[Wishes, ...] = ()  # one for each call of the policy

    def without(self, sequences: list[Sequence]) -> StepPlan:
        """Return the plan without the spans of `sequences`, which finished before it began."""
        return replace(self, spans=tuple(span for span in self.spans if span.sequence not in sequences))

    def going(self) -> StepPlan:
        """Return the plan without the spans of sequences that finished since it was made, by cancellation
        for example."""
        return self.without([span.sequence for span in self.spans if span.sequence.finish_reason is not None])

    def halves(self) -> tuple[StepPlan, StepPlan]:
        """Split the plan into the first half of its spans, at least one, and the others."""
        middle = max(1, len(self.spans) // 2)
        return replace(self, spans=self.spans[:middle]), replace(self, spans=self.spans[middle:])

    @property
    def drafts(self) -> int:
        """Return the number of draft tokens that the step verifies."""
        return sum(len(span.drafts) for span in self.spans)

    def by_rows(self, most: int | None = None) -> StepPlan:
        """Return the plan with each draft token as a row of its own, if it computes nothing but decodes and their
        drafts.

        Args:
            max_rows_per_sequence: the most rows of one sequence; None: any. A plan beyond that is returned as it is.
        """
        checks = [span for span in self.spans if span.length > 1]
        if not checks or any(span.length > 1 + len(span.drafts) for span in checks):
            return self
        if most is not None and any(span.length > most for span in checks):
            return self
        return replace(self, spans=tuple(row for span in self.spans for row in span.rows()))

    @property
    def tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def decode_only(self) -> bool:
        """Return whether every sequence computes one token."""
        return all(span.length == 1 for span in self.spans)

    @property
    def phase(self) -> str:
        decodes = sum(span.decodes for span in self.spans)
        return "decode" if decodes == len(self.spans) else "mixed" if decodes else "prefill"

    @property
    def prefill_tokens(self) -> int:
        return sum(span.length for span in self.spans if not span.decodes)

    @property
    def decode_tokens(self) -> int:
        return self.tokens - self.prefill_tokens

    def _shown(self) -> Table:
        counts = f"{self.prefill_tokens} of prefill, {self.decode_tokens} of decode"
        decisions = [(each.request_id, each.action, each.reason) for each in self.decisions]
        ended = [(sequence.request_id, "ends with an error", told) for sequence, told in self.faults]
        moves = {"evictions": self.moves.evictions, "pages saved": self.moves.saves, "pages copied": self.moves.copies,
                 "pages loaded": self.moves.loads}  # fmt: skip
        told = [f"{len(which)} {name}" for name, which in moves.items() if which]
        told += [f"{self.padding} rows of padding"] * bool(self.padding)
        return Table(
            f"step {self.step}: {self.phase}, {self.tokens} tokens ({counts})",
            [span.told for span in self.spans],
            ("request", "tokens", "kind", "drafted", "logits", "pages now"),
            ", ".join(told),
            beside=(Table("decisions", decisions + ended, ("request", "action", "why")),) if decisions or ended else (),
        )
