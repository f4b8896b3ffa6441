"""Count what a fleet did, by variant of its experiment: requests by their end, tokens, latencies, moves."""

from __future__ import annotations

from collections import Counter, deque
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
    submitted: int = 0  # samples
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

    def _display_table(self) -> Table:
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(self.ended.items()))
        rows: list[tuple[str, object]] = [("samples", f"{self.submitted}: {ended}" if ended else self.submitted)]
        rows += [("prompt tokens", self.prompt_tokens), ("output tokens", self.output_tokens)]
        rows += [("found in caches", self.cached_tokens), ("computed", self.computed_tokens), ("moves", self.moves)]
        rows += [("lost", f"{self.lost_attempts} attempts, {self.lost_tokens} tokens")] * (self.lost_attempts > 0)
        for name, seconds in (("TTFT, median", self.ttft), ("TPOT, median", self.tpot)):
            rows += [(name, f"{1e3 * median(seconds):.1f} ms")] if seconds else []
        return Table(f"variant {self.variant}" if self.variant else "fleet", rows)
