"""Routing, prompts against answers, agents and traffic: arithmetic that inverts, and the figures of the claims."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.economics.tables import PRICES
from tests.helpers.refusals import refuses
from workbench.economics import cache_figures, figures
from workbench.economics import savings as answers
from workbench.economics import savings as routing
from workbench.economics.bill import DAY, Bill, agent_loop_calls, even_times, random_times, traffic_calls
from workbench.economics.prices import Prices, Usage, load_prices
from workbench.economics.prompt_cache import FIVE_MINUTES, cached_usage, uncached_usage
from workbench.simulate.arrival import Arrival
from workbench.simulate.generators import mooncake_conversations

SHARES = st.fractions(0, 1, max_denominator=50)


@given(SHARES, st.integers(1, 40), st.fractions(0, Fraction(1, 10), max_denominator=50), SHARES)
def test_the_simple_share_saves_the_goal(goal: Fraction, times: int, router: Fraction, redone: Fraction) -> None:
    needed = routing.simple_fraction_for_saving(goal, times, router, redone)
    if needed is not None:
        assert routing.routing_saving(needed, times, router, redone) == goal
    else:
        assert (
            routing.routing_saving(1, times, router, redone) < goal
            or routing.routing_saving(1, times, router, redone) <= 0
        )


@given(SHARES, st.integers(2, 40), st.lists(st.integers(1, 9).map(Fraction), min_size=1, max_size=6))
def test_the_fewest_questions_that_save_the_goal(goal: Fraction, times: int, costs: list[Fraction]) -> None:
    """The cheapest so many cover the share of the bill that the goal needs, and one fewer do not."""
    costs, needed = sorted(costs), routing.simple_fraction_for_saving(goal, times)
    found = routing.question_fraction_for_saving(goal, times, costs)
    assert (found is None) == (needed is None)
    if needed is not None and found is not None:
        count = round(found * len(costs))
        assert sum(costs[:count]) >= needed * sum(costs)
        assert count == 1 or sum(costs[: count - 1]) < needed * sum(costs)


def test_questions_that_reach_the_goal_exactly_are_enough() -> None:
    """Two of four equal questions, each at a twentieth of its price, save 19/40 of the bill."""
    assert routing.question_fraction_for_saving(Fraction(19, 40), 20, [Fraction(3)] * 4) == 0.5


def test_seventy_percent_wants_almost_three_quarters_of_the_bill() -> None:
    found = figures.router_savings(arrivals=[Arrival(0.0, 10, 10)] * 9 + [Arrival(0.0, 90, 90)])
    assert found["20"]["simple_share_of_bill"] == float(Fraction(14, 19))
    assert found["30"]["simple_share_of_bill"] == float(Fraction(21, 29))
    assert found["20"]["simple_share_of_questions"] == 1.0  # the nine short ones are half of the bill
    assert routing.routing_saving(Fraction(1, 2), 20) == Fraction(19, 40)
    for wrong in (lambda: routing.routing_saving(2, 20), lambda: routing.routing_saving(0.5, 0.5)):
        refuses("routing: ", wrong)


@given(PRICES, *[st.integers(0, 3000)] * 3, st.booleans())
def test_the_dearest_answer_costs_the_same(prices: Prices, prompt: int, other: int, answer: int, read: bool) -> None:
    if prices.output:
        tokens = answers.break_even_answer_tokens(prices, prompt, other, answer, read)
        mine = prices.cost(Usage(cache_read=prompt) if read else Usage(input=prompt))
        assert mine + tokens * prices.token_price("output") == prices.cost(Usage(input=other, output=answer))


def test_a_detailed_prompt_pays_up_to_an_answer() -> None:
    found = figures.rich_prompt()
    assert found["article-a"] == {"answer_up_to": 140.0, "answer_up_to_if_read": 500.0}
    assert found["article-e-2x"]["answer_up_to"] < 0
    assert answers.break_even_price_ratio(2000, 100, 200, 500) == Fraction(9, 2)
    assert (
        answers.break_even_price_ratio(2000, 500, 200, 500) is None
        and answers.break_even_price_ratio(100, 500, 200, 500) == 0
    )


def test_thinking_is_billed_and_fills_the_context() -> None:
    found = figures.thinking_tokens(prompt=1000, hidden=2000, answer=200)
    assert found == {"times_the_bill": 6.0, "share_of_bill": pytest.approx(5 / 6), "context_tokens": 2000}
    assert figures.thinking_tokens(hidden=0)["times_the_bill"] == 1


@given(st.integers(1, 20), st.integers(0, 10**5), st.integers(1, 5000), st.booleans())
def test_an_agents_calls(calls: int, start: int, new: int, warm: bool) -> None:
    made = list(agent_loop_calls(calls, start, new, output=7, warm=warm))
    assert [call.time for call in made] == [10 * number for number in range(calls + warm)]
    mine = slice(int(warm), None)
    plain, kept = list(uncached_usage(made))[mine], list(cached_usage(made, FIVE_MINUTES))[mine]
    assert sum(u.prompt for u in plain) == calls * start + new * calls * (calls + 1) // 2
    assert sum(u.written for u in kept) == calls * new + (0 if warm else start)
    assert sum(u.output for u in kept) == 7 * calls


def test_the_figures_of_an_agent() -> None:
    found = figures.agent_loop_figures()
    assert (found["prefilled"], found["prefilled_cached"], found["prefilled_warm"]) == (3_600_000, 275_000, 75_000)
    assert (found["first_read"], found["first_new"]) == (200_000, 5_000)
    assert found["cost_warm"] < found["cost_cached"] < found["cost"]


def test_a_traffics_full_blocks_may_be_cached() -> None:
    arrivals = [
        Arrival(0.0, 1100, 5, blocks=(0, 1, 2)), Arrival(9.0, 1700, 6, blocks=(0, 1, 3, 4)),
        Arrival(10.0, 1100, 5, tenant="b", blocks=(0, 1, 2)), Arrival(11.0, 50, 5),
    ]  # fmt: skip
    used = list(cached_usage(traffic_calls(arrivals, system=100), FIVE_MINUTES))
    assert [u.cache_read for u in used] == [0, 100 + 1024, 100, 100]
    assert [u.input for u in used] == [76, 164, 76, 50] and [u.output for u in used] == [5, 6, 5, 5]
    assert [u.prompt - 100 for u in used] == [a.prompt_tokens for a in arrivals]


def test_a_fitted_traffic_is_cheaper_cached() -> None:
    coming = mooncake_conversations(random.Random(0))
    calls = list(traffic_calls(next(coming) for _ in range(300)))
    prices = load_prices("article-a")
    kept, plain = (
        Bill.from_usages(prices, cached_usage(calls, FIVE_MINUTES)),
        Bill.from_usages(prices, uncached_usage(calls)),
    )
    assert kept.num_cache_reads > 0 and kept.usage.prompt == plain.usage.prompt


def test_times_of_a_day() -> None:
    assert even_times(4, 10) == [0, Fraction(5, 2), 5, Fraction(15, 2)]
    times = random_times(2000, DAY, seed=3)
    assert times == sorted(times) == random_times(2000, DAY, seed=3) != random_times(2000, DAY, seed=4)
    assert len(times) == 2000 and times[-1] == pytest.approx(DAY, rel=0.1)
    refuses("give at least 1", even_times, 0)


def test_what_the_ledger_reads_of_caches() -> None:
    daily = cache_figures.cache_daily()
    shares = {(row["arrivals"], row["plan"]): row["share"] for row in daily["rows"]}
    assert daily["uncached"] == 6.0 and daily["most_saved"] == 0.9
    assert shares["even", "5 minutes, renewed by hits"] == 0.89885
    assert daily["requests_a_window"] == pytest.approx(3.4722, abs=1e-4)
    assert daily["share_at_window"] < 0.9 < 0.98 < daily["hit_share_at_window"] < 0.99
    crossing = cache_figures.cache_breakeven()
    assert all(row["request"] == row["simulated_request"] for row in crossing.values())
    assert figures.price_asymmetry() == {"article-a": 5, "article-e-2x": 2, "article-e-4x": 4}


def test_what_the_ledger_reads_of_lives() -> None:
    found = cache_figures.cache_ttl_choice(requests=4000, a_day=(24, 1000))
    assert found["hits_a_write_to_pay"] == {"5 minutes": float(Fraction(5, 18)), "1 hour": float(Fraction(10, 9))}
    for row in found["rows"]:
        for cost in row["costs"].values():
            assert cost["simulated"] == pytest.approx(cost["formula"], rel=0.05)
    assert found["rows"][0]["best"] == "1 hour" and found["rows"][1]["best"] is None
