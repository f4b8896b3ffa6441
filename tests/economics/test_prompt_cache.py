"""Laws of a prompt cache: nothing is read that was not written, and what has expired is written again."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.economics.tables import AMOUNTS, CALLS, PRICES, cheaper
from tests.helpers.refusals import refuses
from tests.thorough import tries
from workbench.economics.bill import Bill
from workbench.economics.prices import KINDS, Prices, Usage, total_usage
from workbench.economics.prompt_cache import (
    CACHE_TTLS,
    FIVE_MINUTES,
    CacheTTL,
    PromptCache,
    PromptCall,
    Seconds,
    cached_usage,
    uncached_usage,
)

PLANS = st.tuples(st.sampled_from(CACHE_TTLS), st.booleans())


def naive(calls: list[PromptCall], life: CacheTTL, renews: bool) -> list[int]:
    """Tokens read by each call: every beginning that was ever sent and marked, with its last write or renewal."""
    alive: dict[tuple, Seconds] = {}
    found = []
    for call in calls:
        names = [name for name, _ in call.segments]
        beginnings = [tuple(names[:end]) for end in range(1, len(names) + 1)]
        hits = [b for b in beginnings if b in alive and call.time - alive[b] < life.seconds]
        marked = [b for b in beginnings if call.marked is None or len(b) in call.marked]
        longest = len(hits[-1]) if hits else 0
        found.append(sum(tokens for _, tokens in call.segments[:longest]))
        alive |= {b: call.time for b in marked if len(b) > longest or renews}
        alive |= {b: call.time for b in hits if renews}
    return found


@settings(max_examples=tries(600))
@given(CALLS, PLANS)
def test_what_is_read_is_the_longest_beginning_that_lives(calls: list[PromptCall], plan: tuple[CacheTTL, bool]) -> None:
    assert [usage.cache_read for usage in cached_usage(calls, *plan)] == naive(calls, *plan)


@given(CALLS, PLANS)
def test_every_token_is_counted_once_whatever_it_costs(calls: list[PromptCall], plan: tuple[CacheTTL, bool]) -> None:
    for call, usage in zip(calls, cached_usage(calls, *plan), strict=True):
        assert usage.prompt == call.cacheable + call.input and usage.output == call.output
        assert usage.input == call.input
    assert total_usage(cached_usage(calls, *plan)).prompt == total_usage(uncached_usage(calls)).prompt


@given(PLANS, st.fractions(0, 8000, max_denominator=8))
def test_a_life_ends(plan: tuple[CacheTTL, bool], gap: Fraction) -> None:
    first, second = cached_usage([PromptCall(0, (("a", 9),)), PromptCall(gap, (("a", 9),))], *plan)
    assert (first.written, first.cache_read) == (9, 0)
    assert (second.written, second.cache_read) == ((0, 9) if gap < plan[0].seconds else (9, 0))


def test_a_hit_renews_or_does_not() -> None:
    for marked in (None, frozenset(), frozenset({1})):  # a hit on what is not marked now too
        calls = [PromptCall(second, (("a", 5),), marked=marked if second else None) for second in (0, 200, 400, 600)]
        assert [u.cache_read for u in cached_usage(calls, FIVE_MINUTES, renews=True)] == [0, 5, 5, 5]
    assert [u.cache_read for u in cached_usage(calls, FIVE_MINUTES, renews=False)] == [0, 5, 0, 5]


@given(CALLS, PLANS, PRICES)
def test_money_is_conserved(calls: list[PromptCall], plan: tuple[CacheTTL, bool], prices: Prices) -> None:
    for usages in (cached_usage(calls, *plan), uncached_usage(calls)):
        bill = Bill.from_usages(prices, usages)
        assert bill.total == sum(map(prices.cost, bill.usages)) == sum(bill.cost_by_kind.values())
        assert bill.total * 10**9 == int(bill.total * 10**9)  # prices have three places of a millionth: nothing drifts
        assert len(bill.usages) == len(calls)


@given(CALLS, PLANS, PRICES, st.sampled_from(KINDS), AMOUNTS)
def test_a_cheaper_price_is_never_a_dearer_bill(calls, plan, prices, kind, by) -> None:
    usages = list(cached_usage(calls, *plan))
    before, after = Bill.from_usages(prices, usages), Bill.from_usages(cheaper(prices, kind, by), usages)
    assert after.total <= before.total and after.saving_against(before) == before.total - after.total >= 0


def test_calls_come_in_order() -> None:
    cache = PromptCache(FIVE_MINUTES)
    cache.serve(PromptCall(5))
    refuses("second 4 after one at 5", lambda: cache.serve(PromptCall(4)))


def test_usages_add_up() -> None:
    assert Usage(1, 2, 3, 4, 5) + Usage(10, 20, 30, 40, 50) == Usage(11, 22, 33, 44, 55)
    assert total_usage([]) == Usage()
