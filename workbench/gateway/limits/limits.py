"""Define limits of callers, and the integer arithmetic of reserving and returning tokens.

A bucket of N per minute holds at most N and refills evenly. Its level is counted in units of 1 / `SCALE`, so that any
number of microseconds adds a whole number of units. `limits_redis.py` does the same arithmetic in a script; both stay
below 2**53, since numbers in Redis's scripts are doubles.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol

from pydantic import Field

from workbench.economics.prices import Money
from workbench.settings import Count, Settings

SCALE = 60_000_000  # microseconds of a minute
DAY = 86_400_000_000  # microseconds
MAX_A_MINUTE = 50_000_000  # times SCALE, twice, is below 2**53
MAX_MICROS = 10**15  # of money
MICROS = 1_000_000  # micro-units of a unit of money
BUCKETS = ("requests", "tokens", "input_tokens", "output_tokens")
TOKENS = ":tokens"  # suffix of a further lease of a running call, which does not count as a call
AT_ONCE, MONEY = "requests_at_once", "money"
Rate = Annotated[int, Field(ge=1, le=MAX_A_MINUTE)]


class CallerLimits(Settings):
    """Limits of one key or tenant; None for no limit."""

    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None  # maximum tokens of prompts and answers together
    input_tokens_per_minute: Rate | None = None
    output_tokens_per_minute: Rate | None = None
    requests_at_once: Count | None = None
    money_per_day: Annotated[Money, Field(le=MAX_MICROS // MICROS)] | None = None  # in the prices' currency; UTC days

    @property
    def rates(self) -> dict[str, int]:
        """Return the limits per minute, by bucket (requests, tokens, input_tokens, output_tokens)."""
        rates = {bucket: getattr(self, f"{bucket}_per_minute") for bucket in BUCKETS}
        return {bucket: rate for bucket, rate in rates.items() if rate is not None}

    @property
    def counts_tokens(self) -> bool:
        """Return whether one of the limits depends on the tokens of a call, by number or by price."""
        return self.money_per_day is not None or bool(self.rates.keys() - {"requests"})

    @property
    def micros_per_day(self) -> int | None:
        return None if self.money_per_day is None else int(self.money_per_day * MICROS)


class Cost(NamedTuple):
    """The cost of a call: the maximum cost, when it is reserved, or the cost of the actual use. Money is in
    micro-units, rounded up.
    """

    requests: int = 0
    tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    micros: int = 0

    def of(self, bucket: str) -> int:
        return getattr(self, bucket)


class Holder(NamedTuple):
    """A rate-limit subject: a key or tenant that a call counts against. Its name is the name of its stored state."""

    name: str
    limits: CallerLimits


class Remaining(NamedTuple):
    """The state of one limit per minute: the limit, the remaining amount, and the microseconds until it is
    full again.
    """

    bucket: str
    limit: int
    remaining: int
    reset: int


@dataclass(frozen=True)
class Reservation:
    """The result of `Limiter.reserve`.

    Args:
        granted: whether the call may begin. If not, nothing was reserved.
        now: time of the answer, in microseconds since 1970.
        refused_by: the exceeded limit: a bucket, `requests_at_once` or `money`.
        holder: the name of the key or tenant with this limit.
        wait: microseconds until the limit would allow the call; -1 for never.
        remaining: remaining amount of every bucket after the reservation.
    """

    granted: bool
    now: int
    refused_by: str = ""
    holder: str = ""
    wait: int = 0
    remaining: tuple[Remaining, ...] = ()


@dataclass
class HolderState:
    """The stored state of one key or tenant: bucket levels, leases and spending. A bucket without a level is full."""

    at: int = 0  # microseconds; the levels are valid at this time
    levels: dict[str, int] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)  # expiry time by lease
    day: int = 0
    spent: int = 0  # micro-units on that day, reservations included


class Limiter(Protocol):
    """A store of limit state. All operations are atomic over all holders and idempotent."""

    async def reserve(self, holders: Sequence[Holder], lease: str, cost: Cost, seconds: float) -> Reservation:
        """Reserve `cost` from every holder, or from none, under the name `lease`, which expires after `seconds`.

        A name that ends with `TOKENS` reserves further cost for a running call and does not count as another concurrent
        call.
        """
        ...

    async def give_back(self, holders: Sequence[Holder], lease: str, reserved: Cost, used: Cost, begun: int) -> None:
        """End a lease that began at `begun`, and return its unused reservation.

        A lease that has expired or already ended returns nothing to the buckets.
        """
        ...

    async def renew(self, holders: Sequence[Holder], lease: str, seconds: float) -> None:
        """Extend a lease to `seconds` from now, if it has not expired yet."""
        ...

    async def remaining(self, holders: Sequence[Holder]) -> tuple[Remaining, ...]:
        """Return the remaining amount of every bucket."""
        ...

    async def close(self) -> None: ...


def reserve(
    states: Mapping[str, HolderState], holders: Sequence[Holder], now: int, lease: str, cost: Cost, life: int
) -> Reservation:
    """Reserve a cost from every holder in `states`, or from none, at time `now`: the arithmetic of `Limiter.reserve`.
    `life` is the lifetime of the lease in microseconds.
    """
    if holders and all(states[each.name].leases.get(lease, 0) > now for each in holders):
        return Reservation(True, now, remaining=remaining(states, holders, now))
    for holder in holders:
        state = states[holder.name]
        for bucket, rate in holder.limits.rates.items():
            missing = cost.of(bucket) * SCALE - level(state, bucket, rate, now)
            if missing > 0:
                wait = -1 if cost.of(bucket) > rate else -(-missing // rate)
                return Reservation(False, now, bucket, holder.name, wait, remaining(states, holders, now))
        most = holder.limits.requests_at_once
        running = [name for name, expiry in state.leases.items() if expiry > now and not name.endswith(TOKENS)]
        if most is not None and len(running) >= most and not lease.endswith(TOKENS):
            return Reservation(False, now, AT_ONCE, holder.name, 0, remaining(states, holders, now))
        budget = holder.limits.micros_per_day
        if budget is not None and _spent(state, now) + cost.micros > budget:
            wait = -1 if cost.micros > budget else DAY - now % DAY
            return Reservation(False, now, MONEY, holder.name, wait, remaining(states, holders, now))
    for holder in holders:
        state = states[holder.name]
        _advance(state, holder.limits, now)
        for bucket in holder.limits.rates:
            state.levels[bucket] -= cost.of(bucket) * SCALE
        state.leases = {name: expiry for name, expiry in state.leases.items() if expiry > now}
        state.leases[lease] = now + life
        state.spent += cost.micros
    return Reservation(True, now, remaining=remaining(states, holders, now))


def give_back(
    states: Mapping[str, HolderState],
    holders: Sequence[Holder],
    now: int,
    lease: str,
    reserved: Cost,
    used: Cost,
    begun: int,
) -> None:
    """End a lease in `states` at time `now`, and return its unused reservation: the arithmetic of `Limiter.give_back`.

    If more was used than reserved, a level falls, but at most to minus one minute's amount.
    """
    for holder in holders:
        state = states[holder.name]
        if state.leases.pop(lease, 0) <= now:
            continue
        _advance(state, holder.limits, now)
        for bucket, rate in holder.limits.rates.items():
            unused = (reserved.of(bucket) - used.of(bucket)) * SCALE
            state.levels[bucket] = max(-rate * SCALE, min(rate * SCALE, state.levels[bucket] + unused))
        if state.day == begun // DAY:  # spending belongs to the day on which the call began
            state.spent = max(0, state.spent - reserved.micros + used.micros)


def renew(states: Mapping[str, HolderState], holders: Sequence[Holder], now: int, lease: str, life: int) -> None:
    """Extend an unexpired lease in `states` to `life` microseconds from time `now`: the arithmetic of
    `Limiter.renew`.
    """
    for holder in holders:
        state = states[holder.name]
        if state.leases.get(lease, 0) > now:
            _advance(state, holder.limits, now)
            state.leases[lease] = now + life


def remaining(states: Mapping[str, HolderState], holders: Sequence[Holder], now: int) -> tuple[Remaining, ...]:
    """Return the remaining amount of every bucket: the smallest one, if several holders limit a bucket."""
    found: dict[str, Remaining] = {}
    for holder in holders:
        for bucket, rate in holder.limits.rates.items():
            here = level(states[holder.name], bucket, rate, now)
            each = Remaining(bucket, rate, max(0, here // SCALE), -(-(rate * SCALE - here) // rate))
            if bucket not in found or each.remaining < found[bucket].remaining:
                found[bucket] = each
    return tuple(found[bucket] for bucket in BUCKETS if bucket in found)


def level(state: HolderState, bucket: str, rate: int, now: int) -> int:
    """Return the level of a bucket of `rate` per minute at time `now`, in units of 1 / `SCALE`."""
    full = rate * SCALE
    passed = min(SCALE * 2, max(0, now - state.at))  # every bucket is full after two minutes
    return min(full, state.levels.get(bucket, full) + passed * rate)


def _advance(state: HolderState, limits: CallerLimits, now: int) -> None:
    state.levels = {bucket: level(state, bucket, rate, now) for bucket, rate in limits.rates.items()}
    state.spent, state.day = _spent(state, now), max(state.day, now // DAY)
    state.at = max(state.at, now)


def _spent(state: HolderState, now: int) -> int:
    return state.spent if state.day >= now // DAY else 0


class MemoryLimiter:
    """A store of limit state in this process.

    Args:
        clock: returns microseconds since 1970.
    """

    def __init__(self, clock: Callable[[], int] = lambda: time.time_ns() // 1000):
        self._clock = clock
        self._states: dict[str, HolderState] = defaultdict(HolderState)

    async def reserve(self, holders: Sequence[Holder], lease: str, cost: Cost, seconds: float) -> Reservation:
        return reserve(self._states, holders, self._clock(), lease, cost, int(seconds * MICROS))

    async def give_back(self, holders: Sequence[Holder], lease: str, reserved: Cost, used: Cost, begun: int) -> None:
        give_back(self._states, holders, self._clock(), lease, reserved, used, begun)

    async def renew(self, holders: Sequence[Holder], lease: str, seconds: float) -> None:
        renew(self._states, holders, self._clock(), lease, int(seconds * MICROS))

    async def remaining(self, holders: Sequence[Holder]) -> tuple[Remaining, ...]:
        return remaining(self._states, holders, self._clock())

    async def close(self) -> None:
        pass
