"""The meters of a gateway: what remains of rates, and money by owner and by key with a budget, day by day."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from workbench.gateway.config import LimitsConfig
from workbench.gateway.limits.limits import Remaining
from workbench.gateway.limits.meters import MAX_METERED, LimitMeters
from workbench.serve.call import Caller
from workbench.serve.watch.snapshot import Meter

LIMITS = LimitsConfig.model_validate({"keys": {"k1": {"money_per_day": "0.5"}}, "tenants": {"a": {"money_per_day": 2}}})
COSTS = st.lists(st.tuples(st.sampled_from(("k1", "k2", "")), st.sampled_from(("a", "b", "")), st.integers(0, 50)))


def money_of(whose: str) -> str:
    return f"{whose}: money today" if whose else "money today"


@given(COSTS)
def test_money_is_the_sum_of_the_days_costs(costs: list[tuple[str, str, int]]) -> None:
    meters = LimitMeters(LIMITS, "USD", lambda: 86_400 * 9 + 60.0)
    for key, owner, hundredths in costs:
        meters.add_cost(Caller(key, owner), Fraction(hundredths, 100))
    found = {each.name: each for each in meters}
    owners = {owner for _, owner, _ in costs}
    assert {name for name in found if "key " not in name} == {money_of(owner) for owner in owners}
    for owner in owners:
        meter = found[money_of(owner)]
        assert meter.used == float(sum(Fraction(cost, 100) for _, name, cost in costs if name == owner))
        assert meter.limit == (2.0 if owner == "a" else None) and meter.unit == "USD"
        assert meter.resets_in == 86_400 - 60
    for owner in {owner for key, owner, _ in costs if key == "k1"}:
        assert found[money_of(f"{owner}, key k1" if owner else "key k1")].limit == 0.5
    assert not any("k2" in name for name in found), "it has no budget of its own"


def test_a_new_day_begins_with_nothing_spent() -> None:
    now = [86_400.0 * 9 - 1]
    meters = LimitMeters(LIMITS, "EUR", lambda: now[0])
    meters.add_cost(Caller("", "a"), Fraction(1))
    assert [each.used for each in meters] == [1.0]
    now[0] += 2
    assert [each.used for each in meters] == [0.0]
    meters.add_cost(Caller("", "a"), Fraction(1, 4))
    assert list(meters) == [Meter("a: money today", 0.25, 2.0, "EUR", 86_399.0)]


def test_rates_are_those_of_a_callers_last_call_and_memory_is_bounded() -> None:
    meters = LimitMeters(LIMITS, "")
    for number in range(MAX_METERED + 5):
        caller = Caller(f"k{number}", "a")
        meters.set_rates(caller, [Remaining("tokens", 60, 45, 15_000_000)])
        meters.add_cost(caller, Fraction(1))
    assert len(list(meters)) == MAX_METERED == len(meters._rates) and len(meters._spent) == MAX_METERED
    assert next(iter(meters)) == Meter("a: tokens a minute", 15, 60, "tokens", 15.0)
    meters.set_rates(caller, [])
    assert len(list(meters)) == MAX_METERED - 1
    oldest = Caller(next(iter(meters._rates)), "a")
    for each in (oldest, Caller("new", "a")):
        meters.set_rates(each, [])
        meters.add_cost(each, Fraction(1))
    assert list(meters._rates)[-2:] == [oldest.key, "new"] and ("a", oldest.key) in meters._spent
