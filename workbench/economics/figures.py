"""Figures that claims about prices are checked with, as plain numbers for the rules of the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from workbench.economics import answers, routing
from workbench.economics.bill import Bill
from workbench.economics.exact_cache import replayed
from workbench.economics.prices import SOURCE, Prices, prices_of
from workbench.economics.prompt_cache import FIVE_MINUTES, cached, uncached
from workbench.economics.usage import Usage
from workbench.economics.workloads import agent_loop
from workbench.traffic.arrival import Arrival

Figures = dict[str, Any]


def price_asymmetry(tables: Iterable[str] = (SOURCE, "article-e-2x", "article-e-4x")) -> Figures:
    """Return the price ratio of an output token to an input token, by table."""
    found = {name: prices_of(name) for name in tables}
    return {name: float(prices.output / prices.input) for name, prices in found.items()}


def router_savings(
    prices: Prices | None = None,
    arrivals: Iterable[Arrival] = (),
    goal: Fraction = Fraction(7, 10),
    cheaper: Iterable[int] = (20, 30),
) -> Figures:
    """Return the savings of routing, by how many times cheaper the small model is.

    Gives the fraction of the bill that must be simple to save `goal`. Gives the fraction of a traffic's questions if
    the cheapest are simple. Gives the saving if the cheapest four of five are."""
    prices = prices or prices_of(SOURCE)
    costs = [prices.cost(Usage(input=each.prompt_tokens, output=each.output_tokens)) for each in arrivals]
    return {
        str(times): {
            "most_saved": float(routing.saving(1, times)),
            "simple_share_of_bill": _number(routing.simple_to_save(goal, times)),
            "simple_share_of_questions": routing.questions_to_save(goal, times, costs),
            "saved_by_four_of_five": routing.saving_of_cheapest(Fraction(4, 5), times, costs),
        }
        for times in cheaper
    }


def exact_cache(arrivals: Iterable[Arrival], prices: Prices | None = None, size: int = 100_000) -> Figures:
    """Return the hits and savings of a response cache in a traffic with named prompt blocks."""
    found = replayed(arrivals, prices or prices_of(SOURCE), size)
    rate, share = found.hit_rate, found.share
    return {"requests": found.requests, "hits": found.hits, "hit_rate": rate, "saved_share": share}


def rich_prompt(tables: Iterable[str] = (SOURCE, "article-e-2x", "article-e-4x")) -> Figures:
    """Compare a prompt of 2,000 tokens with one of 200 and an answer of 500.

    Returns, by table, the break-even answer length of the first; also with the prompt read from a cache, where there is
    one."""
    found = {name: prices_of(name) for name in tables}
    rows = {
        name: {
            "answer_up_to": float(answers.dearest_answer(prices, 2000, 200, 500)),
            "answer_up_to_if_read": (
                float(answers.dearest_answer(prices, 2000, 200, 500, read=True)) if prices.cache_read else None
            ),
        }
        for name, prices in found.items()
    }
    ratios = {str(answer): _number(answers.ratio_to_pay(2000, answer, 200, 500)) for answer in (1, 50, 100, 200)}
    return rows | {"ratio_to_pay_by_answer": ratios}


def thinking_tokens(
    prompt: int = 1000, hidden: int = 2000, answer: int = 200, prices: Prices | None = None
) -> Figures:
    """Return an example's bill and context with hidden tokens before the answer, and without."""
    found = answers.thinking(prices or prices_of(SOURCE), prompt, hidden, answer)
    return {
        "times_the_bill": float(found.cost / found.cost_without),
        "share_of_bill": float(found.share),
        "context_tokens": found.context - found.context_without,
    }


def agent_loop_figures(
    calls: int = 15, start: int = 200_000, new: int = 5_000, output: int = 0, prices: Prices | None = None
) -> Figures:
    """Return the prefilled tokens and the bill of a conversation that is sent again with each call.

    Gives three cases: no cache, a cache, and a cache that already holds the beginning."""
    prices = prices or prices_of(SOURCE)
    cold, warm = (list(agent_loop(calls, start, new, output, warm=known)) for known in (False, True))
    without, with_ = Bill.of(prices, uncached(cold)), Bill.of(prices, cached(cold, FIVE_MINUTES))
    known = Bill.of(prices, itertools.islice(cached(warm, FIVE_MINUTES), 1, None))
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
