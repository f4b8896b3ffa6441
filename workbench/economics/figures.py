"""Compute figures about prices, as plain numbers that the rules of the claims ledger check."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from workbench.economics import savings as answers
from workbench.economics import savings as routing
from workbench.economics.bill import Bill, agent_loop_calls
from workbench.economics.prices import DEFAULT_TABLE, Usage, load_prices
from workbench.economics.prompt_cache import FIVE_MINUTES, cached_usage, uncached_usage
from workbench.simulate.arrival import Arrival

Figures = dict[str, Any]
TABLES = (DEFAULT_TABLE, "article-e-2x", "article-e-4x")
GOAL = Fraction(7, 10)  # fraction of the bill to save


def price_asymmetry() -> Figures:
    """Return for each price table the price of an output token divided by the price of an input token."""
    found = {name: load_prices(name) for name in TABLES}
    return {name: float(prices.output / prices.input) for name, prices in found.items()}


def router_savings(arrivals: Iterable[Arrival] = (), cheaper: Iterable[int] = (20, 30)) -> Figures:
    """Return what routing to a smaller model saves, for each price factor in `cheaper`.

    The figures are the fraction of the bill that must go to simple questions to save `GOAL`, the fraction of questions
    that this takes if the cheapest questions are simple, and the fraction saved if the cheapest four of five questions
    are simple."""
    prices = load_prices(DEFAULT_TABLE)
    costs = [prices.cost(Usage(input=each.prompt_tokens, output=each.output_tokens)) for each in arrivals]
    return {
        str(times): {
            "most_saved": float(routing.routing_saving(1, times)),
            "simple_share_of_bill": _number(routing.simple_fraction_for_saving(GOAL, times)),
            "simple_share_of_questions": routing.question_fraction_for_saving(GOAL, times, costs),
            "saved_by_four_of_five": routing.cheapest_first_saving(Fraction(4, 5), times, costs),
        }
        for times in cheaper
    }


def rich_prompt(tables: Iterable[str] = TABLES) -> Figures:
    """Compare a prompt of 2,000 tokens with a prompt of 200 tokens and an answer of 500.

    Returns for each price table the answer length up to which the longer prompt costs less; also with that prompt read
    from a cache, if the table has a cache price."""
    found = {name: load_prices(name) for name in tables}
    rows = {
        name: {
            "answer_up_to": float(answers.break_even_answer_tokens(prices, 2000, 200, 500)),
            "answer_up_to_if_read": (
                float(answers.break_even_answer_tokens(prices, 2000, 200, 500, from_cache=True))
                if prices.cache_read
                else None
            ),
        }
        for name, prices in found.items()
    }
    ratios = {
        str(answer): _number(answers.break_even_price_ratio(2000, answer, 200, 500)) for answer in (1, 50, 100, 200)
    }
    return rows | {"ratio_to_pay_by_answer": ratios}


def thinking_tokens(prompt: int = 1000, hidden: int = 2000, answer: int = 200) -> Figures:
    """Return how much hidden thinking tokens before an answer add to its bill and its context."""
    found = answers.thinking_cost(load_prices(DEFAULT_TABLE), prompt, hidden, answer)
    return {
        "times_the_bill": float(found.cost / found.cost_without),
        "share_of_bill": float(found.thinking_fraction),
        "context_tokens": found.context - found.context_without,
    }


def agent_loop_figures(calls: int = 15, start: int = 200_000) -> Figures:
    """Return the prefilled tokens and the bill of a conversation that each call sends again as a whole, 5,000 tokens
    longer.

    The cases are: no cache, a cache, and a cache that already holds the beginning."""
    prices = load_prices(DEFAULT_TABLE)
    cold, warm = (list(agent_loop_calls(calls, start, 5_000, 0, warm=known)) for known in (False, True))
    without, with_ = (
        Bill.from_usages(prices, uncached_usage(cold)),
        Bill.from_usages(prices, cached_usage(cold, FIVE_MINUTES)),
    )
    known = Bill.from_usages(prices, itertools.islice(cached_usage(warm, FIVE_MINUTES), 1, None))
    first = known.usages[0]
    return {
        "prefilled": without.usage.prompt,
        "prefilled_cached": with_.usage.written + with_.usage.input,
        "prefilled_warm": known.usage.written + known.usage.input,
        "cost": float(without.total), "cost_cached": float(with_.total), "cost_warm": float(known.total),
        "first_read": first.cache_read, "first_new": first.written + first.input,
    }  # fmt: skip


def _number(value: Fraction | None) -> float | None:
    return None if value is None else float(value)
