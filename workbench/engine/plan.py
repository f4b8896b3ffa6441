"""What the scheduler decided for one step. Integers only."""

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
    samples: bool  # whether the last token's logits are wanted: everything known is then computed
    scored: int | None = None  # last tokens whose logits are wanted; None: one where it samples, else none
    drafts: tuple[int, ...] = ()  # its last tokens, where these are not known but proposed

    @classmethod
    def of(cls, sequence: Sequence, length: int) -> Span:
        """The next `length` tokens of `sequence`."""
        return cls(sequence, sequence.computed, length, samples=length == sequence.waiting_tokens)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def logit_rows(self) -> int:
        return int(self.samples) + len(self.drafts) if self.scored is None else self.scored

    @property
    def decodes(self) -> bool:
        """Whether it computes one token that was generated, and what was drafted after it; anything else is prefill."""
        return self.length == 1 + len(self.drafts) and self.start >= self.sequence.prompt_length

    @property
    def ids(self) -> list[int]:
        return [*self.sequence.token_ids[self.start : self.end - len(self.drafts)], *self.drafts]

    @property
    def told(self) -> tuple[object, ...]:
        """Cells of a table: request, tokens, kind, drafted, rows of logits, pages that it holds now by table."""
        kind = "check" if self.drafts else "decode" if self.decodes else "prefill"
        where = str(self.start) if self.length == 1 else f"{self.start} - {self.end - 1}"
        held = ", ".join(str(sum(page != NULL_PAGE for page in pages)) for pages in self.sequence.pages)
        return self.sequence.request_id, where, kind, len(self.drafts) or "", self.logit_rows or "", held

    def rows(self) -> list[Span]:
        """A decode and what was drafted after it as spans of one token, each of which reads what those before write."""
        rows = enumerate(self.drafts, self.start + 1)
        return [
            Span(self.sequence, self.start, 1, self.samples),
            *(Span(self.sequence, at, 1, True, scored=1, drafts=(token,)) for at, token in rows),
        ]


@dataclass(frozen=True)
class Decision:
    """Why something happened to a request: `action` is admitted, waiting, cut, evicted, set_back or refused_wish."""

    request_id: str
    action: str
    reason: str


@dataclass(frozen=True)
class StepPlan(Shown):
    """Spans to compute, decodes (length 1) first, and the decisions that led to them."""

    step: int
    spans: tuple[Span, ...]
    decisions: tuple[Decision, ...] = ()
    moves: Moves = field(default_factory=Moves)  # of pages, before anything is computed
    faults: tuple[tuple[Sequence, str], ...] = ()  # who must end with an error, and which
    padding: int = 0  # rows of a padded batch that are computed for nobody
    wishes: tuple[Wishes, ...] = ()  # the policy's, once for each time it was asked

    def without(self, sequences: list[Sequence]) -> StepPlan:
        """The plan less the spans of `sequences`, which ended before it began."""
        return replace(self, spans=tuple(span for span in self.spans if span.sequence not in sequences))

    def going(self) -> StepPlan:
        """The plan less the spans of what ended since it was made: it may have been cancelled."""
        return self.without([span.sequence for span in self.spans if span.sequence.finish_reason is not None])

    def halves(self) -> tuple[StepPlan, StepPlan]:
        """The first half of the spans, one at least, and the others."""
        middle = max(1, len(self.spans) // 2)
        return replace(self, spans=self.spans[:middle]), replace(self, spans=self.spans[middle:])

    @property
    def drafts(self) -> int:
        """Tokens that are computed on trial."""
        return sum(len(span.drafts) for span in self.spans)

    def by_rows(self, most: int | None = None) -> StepPlan:
        """The plan with drafted tokens as rows of their own, `most` of one sequence, where it computes nothing else
        beside single tokens; otherwise the plan as it is."""
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
        """Whether every sequence computes one token."""
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
