"""Count what a fleet did, by variant of its experiment: requests by their end, tokens, latencies, moves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from workbench.display import Displayable, Table
from workbench.trace.events import Finished

KEPT_LATENCIES = 10_000


@dataclass
class FleetAccount(Displayable):
    """The account of one variant.

    Tokens are those of samples that ended. One that was generated counts once, also where its sample moved. A replica
    that was killed may have computed more than it reported: that is in no account, and no client had it.
    """

    variant: str = ""
    submitted: int = 0  # samples, with those that it took over from another variant
    left: int = 0  # of them, those that another variant took over
    ended: Counter[str] = field(default_factory=Counter)  # samples by finish reason
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # with `lost_tokens` of these samples
    moves: int = 0  # requests that went on at another replica
    lost_attempts: int = 0  # samples whose replica was lost, or left and handed them over; one may be lost twice
    lost_tokens: int = 0  # that those replicas had computed for them and reported: computed again, but for cached ones
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES), repr=False)  # seconds
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES), repr=False)

    def add(self, end: Finished, arrival: float, first_token: float | None, last_token: float | None) -> None:
        """Add a sample that ended, with the times of its first and last token, if it had any."""
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
        """Return what it counts, in words; the same rows for every variant."""
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(self.ended.items()))
        found: list[tuple[str, object]] = [("samples", self.submitted - self.left), ("ended", ended or "none")]
        found += [("prompt tokens", self.prompt_tokens), ("output tokens", self.output_tokens)]
        found += [("found in caches", self.cached_tokens), ("computed", self.computed_tokens), ("moves", self.moves)]
        found += [("lost", f"{self.lost_attempts} attempts, {self.lost_tokens} tokens")]
        latencies = (("TTFT, median", tuple(self.ttft)), ("TPOT, median", tuple(self.tpot)))
        return found + [(name, f"{1e3 * median(each):.1f} ms" if each else "unknown") for name, each in latencies]

    def _display_table(self) -> Table:
        return Table(f"variant {self.name}", self.rows())


def compare_variants(accounts: Iterable[FleetAccount]) -> Table:
    """Return a table of variants beside each other, a column for each."""
    known = list(accounts)
    columns = [dict(each.rows()) for each in known]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table("variants of the fleet", rows, ("", *(each.name for each in known)))
