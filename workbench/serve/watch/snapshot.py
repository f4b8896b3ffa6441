"""Describe a server's state at one moment, as values that can be written to JSON and read back.

Times are seconds on the runner's clock, as in the events; `wall_time` is the same moment in wall time. Only reading
needs more than the standard library.
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
    """Percentiles in seconds of `count` values, interpolated linearly between ranks as in numpy; None
    without values.
    """

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
    """The numbers of tokens in the second that begins at `time`: computed prompt tokens, and sampled output tokens."""

    time: float
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class PageUse:
    """Page counts over all cache groups: held by requests, idle (held by the prefix cache alone), and free."""

    used: int = 0
    idle: int = 0
    free: int = 0

    @property
    def total(self) -> int:
        return self.used + self.idle + self.free


@dataclass(frozen=True)
class Meter:
    """The use of one limit of a gate: requests or tokens per minute, concurrent requests, or money per day.

    Args:
        name: subject and quantity (`alice: tokens a minute`).
        used: amount used now, in `unit`.
        limit: maximum amount; None without a limit.
        unit: requests, tokens, or a currency (`USD`).
        resets_in: seconds until the full limit is free again; None if never, or at once.
    """

    name: str
    used: float
    limit: float | None = None
    unit: str = ""
    resets_in: float | None = None


@dataclass(frozen=True)
class TracedToken:
    """An output token, its sampling time, and the text that could be shown then."""

    time: float
    token_id: int
    text: str = ""
    step: int = 0


@dataclass(frozen=True)
class TracedDecision:
    """A decision of the scheduler on a request, with its reason; for a prefill chunk the reason is its number of
    tokens.
    """

    time: float
    step: int
    action: str
    reason: str = ""


@dataclass(frozen=True)
class RequestTrace:
    """The tokens of one request and the scheduler's decisions on it. Of a long request only the last ones are kept;
    `dropped` is the number of earlier ones.
    """

    tokens: tuple[TracedToken, ...] = ()
    decisions: tuple[TracedDecision, ...] = ()
    dropped: int = 0


@dataclass(frozen=True)
class RequestStatus:
    """The status of one request (a choice of a call): its state, one of `STATES`, its times, and its numbers of tokens.

    Times of future events are None. `preempted` are the intervals without pages; the last interval may be open.
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
    reason: str = ""  # finish reason or error
    preempted: tuple[tuple[float, float | None], ...] = ()

    @property
    def ttft(self) -> float | None:
        """Return the seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Return the seconds per token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class ServerSnapshot:
    """A server's work at `time`, and in the `window` seconds before.

    Args:
        time: moment of the snapshot on the runner's clock.
        wall_time: moment of the snapshot, in seconds since 1970.
        window: length in seconds of the window of latencies, rates and cache hits.
        model: the served name or names.
        uptime: seconds since the server started.
        requests: number of requests in each of `STATES`; ended requests count since the start.
        prompt_tokens_per_second: prompt tokens computed per second, over the last ten seconds.
        output_tokens_per_second: tokens sampled per second, over the last ten seconds.
        rates: tokens of each second of the window, oldest first; the last second is incomplete.
        ttft: time to first token of requests with a first token in the window.
        tpot: time per output token of requests that finished in the window.
        pages: pages of the KV cache.
        prompt_tokens: prompt tokens of requests with a prefill that began in the window.
        cached_tokens: number of these prompt tokens that were found in the prefix cache.
        meters: limits and money, if a gate counts them.
        recent: the latest requests, in order of arrival; the number of ended requests is bounded.
        traces: traces of recent requests by id, if requested.
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
        """Return the fraction of prompt tokens that were found in the prefix cache; None without prompts."""
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
        """Create a snapshot from the result of `to_dict`.

        Raises:
            WorkbenchError: for invalid `values`; the message names `source`.
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
        """Read a snapshot written by `save`."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise WorkbenchError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise WorkbenchError(f"{path} is no snapshot of a server: not JSON") from None
        return cls.from_dict(values, str(path))
