"""Compute savings in closed form: a detailed prompt against a longer answer, thinking before the answer, and routing
simple questions to a cheaper model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.prices import Prices, Usage
from workbench.errors import WorkbenchError

Share = Fraction | float


def break_even_answer_tokens(
    prices: Prices, prompt: int, other_prompt: int, other_answer: int, from_cache: bool = False
) -> Fraction:
    """Return the answer length below which `prompt` costs less than `other_prompt` with an answer of `other_answer`
    tokens.

    A value below 0 means that `prompt` never costs less. `from_cache`: it is read from a prompt cache."""
    budget = prices.cost(Usage(input=other_prompt, output=other_answer))
    mine = prices.cost(Usage(cache_read=prompt) if from_cache else Usage(input=prompt))
    return (budget - mine) / prices.token_price("output")


def break_even_price_ratio(prompt: int, answer: int, other_prompt: int, other_answer: int) -> Fraction | None:
    """Return the price ratio of an output token to an input token at which both pairs of prompt and answer cost the
    same.

    At a higher ratio, `prompt` and `answer` cost less than the other pair. None if there is no such ratio."""
    if answer >= other_answer:
        return Fraction(0) if prompt < other_prompt else None
    return Fraction(max(0, prompt - other_prompt), other_answer - answer)


@dataclass(frozen=True)
class ThinkingCost:
    """The cost and the context length of an answer, with and without hidden tokens before it."""

    cost: Fraction
    cost_without: Fraction
    context: int  # positions used in the model's context and cache
    context_without: int

    @property
    def thinking_fraction(self) -> Fraction:
        """Return the fraction of the bill that thinking costs."""
        return (self.cost - self.cost_without) / self.cost if self.cost else Fraction(0)


def thinking_cost(prices: Prices, prompt: int, hidden: int, answer: int) -> ThinkingCost:
    """Price an answer with `hidden` thinking tokens, which are decoded and billed as output."""
    with_, without = Usage(input=prompt, output=hidden + answer), Usage(input=prompt, output=answer)
    return ThinkingCost(prices.cost(with_), prices.cost(without), prompt + hidden + answer, prompt + answer)


def routing_saving(
    simple_fraction: Share, times_cheaper: Share, router_overhead: Share = 0, escalated_fraction: Share = 0
) -> Fraction:
    """Return the fraction of the bill that routing saves.

    Args:
        simple_fraction: Fraction of the bill (not of the questions) that goes to the cheaper model.
        times_cheaper: Price of the expensive model over the cheaper one's.
        router_overhead: Cost of classifying, as a fraction of the bill.
        escalated_fraction: Fraction of the simple questions that fail and run on the expensive model too.
    """
    for name, value in (("simple", simple_fraction), ("router", router_overhead), ("redone", escalated_fraction)):
        if not 0 <= value <= 1:
            raise WorkbenchError(f"routing: {name} is {value}; it is a share, from 0 to 1")
    if times_cheaper < 1:
        raise WorkbenchError(f"routing: {times_cheaper} times cheaper; give 1 or more")
    return Fraction(simple_fraction) * (1 - 1 / Fraction(times_cheaper) - Fraction(escalated_fraction)) - Fraction(
        router_overhead
    )


def simple_fraction_for_saving(
    goal: Share, times_cheaper: Share, router: Share = 0, redone: Share = 0
) -> Fraction | None:
    """Return the fraction of the bill that must go to simple questions so that routing saves `goal`, a fraction of the
    bill; None if routing everything saves less."""
    kept = 1 - 1 / Fraction(times_cheaper) - Fraction(redone)
    needed = (Fraction(goal) + Fraction(router)) / kept if kept > 0 else Fraction(2)
    return needed if needed <= 1 else None


def cheapest_first_saving(share: Share, times_cheaper: Share, costs: Iterable[Fraction]) -> float:
    """Return the fraction of the bill saved if the cheapest questions, a fraction `share` of all, are simple and
    routed; 0 without questions."""
    ordered = sorted(costs)
    whole = sum(ordered, Fraction(0))
    routed = sum(ordered[: int(Fraction(share) * len(ordered))], Fraction(0))
    return float(routing_saving(routed / whole, times_cheaper)) if whole else 0.0


def question_fraction_for_saving(goal: Share, times_cheaper: Share, costs: Iterable[Fraction]) -> float | None:
    """Return the fraction of the questions, cheapest first, that must be simple so that routing saves `goal`, a
    fraction of the bill; None if routing all saves less.

    Short questions are many and cost little, so this fraction is larger than their fraction of the bill."""
    ordered = sorted(costs)
    whole = sum(ordered, Fraction(0))
    needed = simple_fraction_for_saving(goal, times_cheaper)
    if needed is None or not whole:
        return None
    routed = Fraction(0)
    for count, cost in enumerate(ordered, 1):
        routed += cost
        if routed >= needed * whole:
            return count / len(ordered)
    return None
