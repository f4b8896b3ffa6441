"""Track the callers' use of limits and today's spending, for monitoring.

Rates are from a caller's last call: a bucket that has refilled since then still shows that use.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from workbench.gateway.config import LimitsConfig
from workbench.gateway.limits.limits import MICROS, Remaining
from workbench.serve.call import Caller
from workbench.serve.watch.snapshot import Meter

MAX_METERED = 1_000  # maximum number of tracked keys and owners
DAY_SECONDS = 86_400


class LimitMeters:
    """The use of limits and today's spending, for each of the most recent callers.

    Args:
        limits: limits of keys and their owners.
        currency: currency of the prices; empty if calls are free.
        clock: returns seconds since 1970.
    """

    def __init__(self, limits: LimitsConfig, currency: str, clock: Callable[[], float] = time.time):
        self._limits, self._currency, self._clock = limits, currency, clock
        self._rates: OrderedDict[str, tuple[Meter, ...]] = OrderedDict()  # by key
        self._spent: OrderedDict[tuple[str, str], tuple[int, Fraction]] = OrderedDict()  # (owner, key): day, money

    def set_rates(self, caller: Caller, remaining: Sequence[Remaining]) -> None:
        """Record the remaining limits per minute of a caller."""
        of_whom = f"{caller.tenant}: " if caller.tenant else ""
        self._rates[caller.key] = tuple(
            Meter(
                f"{of_whom}{each.bucket.replace('_', ' ')} a minute", each.limit - each.remaining, each.limit,
                each.bucket.rpartition("_")[2], each.reset / MICROS,
            )
            for each in remaining
        )  # fmt: skip
        _keep_latest(self._rates, caller.key)

    def add_cost(self, caller: Caller, cost: Fraction) -> None:
        """Add the cost of a call to the day's spending of its key and of the key's owner."""
        today = int(self._clock()) // DAY_SECONDS
        for holder in ((caller.tenant, ""), (caller.tenant, caller.key)) if caller.key else ((caller.tenant, ""),):
            day, before = self._spent.get(holder, (today, Fraction(0)))
            self._spent[holder] = (today, cost + (before if day == today else 0))
            _keep_latest(self._spent, holder)

    def __iter__(self) -> Iterator[Meter]:
        """Yield limits per minute, then the spending of each owner, and of each key with its own budget."""
        for meters in list(self._rates.values()):
            yield from meters
        if not self._currency:
            return
        now = self._clock()
        for (owner, key), (day, spent) in list(self._spent.items()):
            limits = self._limits.holders(Caller(key, owner))
            # Callers without keys share one budget, of a key or of an owner.
            wanted = (f"key:{key}",) if key else (f"tenant:{owner}", "key:") if not owner else (f"tenant:{owner}",)
            budgets = [each.limits.money_per_day for each in limits if each.name in wanted]
            budget = min((each for each in budgets if each is not None), default=None)
            if key and budget is None:
                continue
            whose = ", ".join(filter(None, (owner, key and f"key {key}")))
            name = f"{whose}: money today" if whose else "money today"
            is_today = day == int(now) // DAY_SECONDS
            yield Meter(
                name, float(spent) if is_today else 0.0, None if budget is None else float(budget), self._currency,
                DAY_SECONDS - now % DAY_SECONDS,
            )  # fmt: skip


def _keep_latest(found: OrderedDict, key: object) -> None:
    found.move_to_end(key)
    while len(found) > MAX_METERED:
        found.popitem(last=False)
