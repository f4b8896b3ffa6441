"""Count the requests of a fleet, for each variant that it serves: finish reasons, tokens, latencies and moves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from workbench.display import Displayable, Table
from workbench.trace.events import Finished
from workbench.units import format_seconds

KEPT_LATENCIES = 10_000


@dataclass
class FleetAccount(Displayable):
    """The counts and latencies of the samples that one variant served.

    Token counts cover finished samples. A generated token counts once, even if its sample moved to another replica.
    Tokens that a killed replica computed but did not report are not counted; no client received them.
    """

    variant: str = ""
    submitted: int = 0  # samples, including samples taken over from another variant
    left: int = 0  # submitted samples that another variant took over
    ended: Counter[str] = field(default_factory=Counter)  # samples by finish reason
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # including the samples' `lost_tokens`
    moves: int = 0  # requests that continued on another replica
    lost_attempts: int = 0  # samples that lost their replica or were handed over; a sample may count twice
    lost_tokens: int = 0  # reported by the former replicas; recomputed unless cached
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES), repr=False)  # seconds
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES), repr=False)

    def add(self, end: Finished, arrival: float, first_token: float | None, last_token: float | None) -> None:
        """Add a finished sample, with the times of its arrival and its first and last token (None: no tokens)."""
        self.ended[end.reason] += 1
        self.prompt_tokens += end.prompt_tokens
        self.output_tokens += len(end.token_ids)
        self.cached_tokens += end.cached_tokens
        self.computed_tokens += end.computed_tokens
        if first_token is None or last_token is None:
            return
        self.ttft.append(first_token - arrival)
        if len(end.token_ids) > 1:
            self.tpot.append((last_token - first_token) / (len(end.token_ids) - 1))

    @property
    def name(self) -> str:
        return self.variant or "first"

    def rows(self) -> list[tuple[str, object]]:
        """Return a (label, value) pair for each figure of the account; every variant has the same rows."""
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(self.ended.items()))
        found: list[tuple[str, object]] = [("samples", self.submitted - self.left), ("ended", ended or "none")]
        found += [("prompt tokens", self.prompt_tokens), ("output tokens", self.output_tokens)]
        found += [("found in caches", self.cached_tokens), ("computed", self.computed_tokens), ("moves", self.moves)]
        found += [("lost", f"{self.lost_attempts} attempts, {self.lost_tokens} tokens")]
        latencies = (("TTFT, median", tuple(self.ttft)), ("TPOT, median", tuple(self.tpot)))
        return found + [(name, format_seconds(median(each) if each else None)) for name, each in latencies]

    def _display_table(self) -> Table:
        return Table(f"variant {self.name}", self.rows())


def compare_variants(accounts: Iterable[FleetAccount]) -> Table:
    """Return a table of the accounts, with one column for each variant."""
    known = list(accounts)
    columns = [dict(each.rows()) for each in known]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table("variants of the fleet", rows, ("", *(each.name for each in known)))
