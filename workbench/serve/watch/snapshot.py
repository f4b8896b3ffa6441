"""Describe what a server does at one moment, as values that are written to JSON and read back.

Times are seconds on the runner's clock, as in the events; `wall_time` says when that was. Standard library only, but
for reading.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from workbench.errors import WorkbenchError

ACTIVE = ("waiting", "prefill", "decode")
ENDED = ("finished", "cancelled", "failed")
STATES = ACTIVE + ENDED


@dataclass(frozen=True)
class LatencyPercentiles:
    """Percentiles in seconds of `count` values, linear between ranks as numpy's; None without values."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def over(cls, values: list[float]) -> LatencyPercentiles:
        if len(values) < 2:
            return cls(len(values), *values * 3)
        cuts = quantiles(values, n=100, method="inclusive")
        return cls(len(values), cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True)
class TokenRate:
    """Tokens of the second that begins at `time`: of prompts, computed, and of answers, sampled."""

    time: float
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class PageUse:
    """Pages of all cache groups: held by requests, idle (of the prefix cache alone), and free."""

    used: int = 0
    idle: int = 0
    free: int = 0

    @property
    def total(self) -> int:
        return self.used + self.idle + self.free


@dataclass(frozen=True)
class Meter:
    """A count of a gate against its limit: requests or tokens a minute, requests at once, money a day.

    Args:
        name: what is counted, and of whom (`alice: tokens a minute`).
        used: how much of it is used now, in `unit`.
        limit: how much may be; None without a limit.
        unit: requests, tokens, or a currency (`USD`).
        resets_in: seconds until all of it is free again; None where it never is, or at once.
    """

    name: str
    used: float
    limit: float | None = None
    unit: str = ""
    resets_in: float | None = None


@dataclass(frozen=True)
class TracedToken:
    """An output token, when it was sampled, and the text that could be shown then."""

    time: float
    token_id: int
    text: str = ""
    step: int = 0


@dataclass(frozen=True)
class TracedDecision:
    """A decision of the scheduler on a request, with its reason; a prefill chunk has its tokens as the reason."""

    time: float
    step: int
    action: str
    reason: str = ""


@dataclass(frozen=True)
class RequestTrace:
    """The tokens of one request and the decisions on it; of a long one the last. `dropped` counts the others."""

    tokens: tuple[TracedToken, ...] = ()
    decisions: tuple[TracedDecision, ...] = ()
    dropped: int = 0


@dataclass(frozen=True)
class RequestStatus:
    """One request (a choice of a call): its state, one of `STATES`, its times and its tokens.

    Times of what has not happened are None. `preempted` are the intervals without pages, the last one may be open.
    """

    id: str
    state: str
    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tenant: str = ""
    reason: str = ""  # why it ended, or its error
    preempted: tuple[tuple[float, float | None], ...] = ()

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first one; None for less than two."""
        if self.output_tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class ServerSnapshot:
    """A server's work at `time`, and in the `window` seconds before.

    Args:
        time: on the runner's clock.
        wall_time: the same moment, in seconds since 1970.
        window: seconds that the latencies, rates and the cache's share are of.
        model: the name, or names, that the server answers to.
        uptime: seconds since the server began.
        requests: how many are in each of `STATES`; those that have ended are counted since the beginning.
        prompt_tokens_per_second: prompt tokens computed a second, over the last ten seconds.
        output_tokens_per_second: tokens sampled a second, over the last ten seconds.
        rates: tokens of each second of the window, oldest first; the last second is under way.
        ttft: of requests whose first token came in the window.
        tpot: of requests that finished in the window.
        pages: of the KV cache.
        prompt_tokens: of requests whose prefill began in the window.
        cached_tokens: of these, found in the prefix cache.
        meters: limits and money, where a gate counts them.
        recent: the latest requests, in order of arrival; of those that ended only so many.
        traces: of recent requests, by id, where they were asked for.
    """

    time: float
    wall_time: float = 0.0
    window: float = 60.0
    model: str = ""
    uptime: float = 0.0
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    prompt_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    rates: tuple[TokenRate, ...] = ()
    ttft: LatencyPercentiles = LatencyPercentiles()
    tpot: LatencyPercentiles = LatencyPercentiles()
    pages: PageUse = PageUse()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    meters: tuple[Meter, ...] = ()
    recent: tuple[RequestStatus, ...] = ()
    traces: dict[str, RequestTrace] = field(default_factory=dict)

    @property
    def cache_hit_share(self) -> float | None:
        """The share of prompt tokens that were found in the prefix cache; None without prompts."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | Path) -> Path:
        """Write the snapshot as a JSON file, which `load` reads, and return its path."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        return path

    @classmethod
    def from_dict(cls, values: object, source: str = "a snapshot") -> ServerSnapshot:
        """Make a snapshot of what `to_dict` gave.

        Raises:
            WorkbenchError: `values` are none; `source` is named.
        """
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise WorkbenchError(f"{source} is no snapshot of a server: {where}: {first['msg']}") from None

    @classmethod
    def load(cls, path: str | Path) -> ServerSnapshot:
        """Read a snapshot that `save` wrote."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise WorkbenchError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise WorkbenchError(f"{path} is no snapshot of a server: not JSON") from None
        return cls.from_dict(values, str(path))
