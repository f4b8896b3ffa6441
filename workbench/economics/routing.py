"""Savings of routing: simple questions go to a cheaper model, the others to the original one."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from workbench.errors import WorkbenchError

Share = Fraction | float


def routing_saving(simple_fraction: Share, times_cheaper: Share, router_overhead: Share = 0, escalated_fraction: Share = 0) -> Fraction:
    """Return the fraction of the bill that routing saves.

    Args:
        simple_fraction: Fraction of the bill (not of the questions) that goes to the cheaper model.
        times_cheaper: Price of the expensive model over the cheaper one's.
        router_overhead: Cost of classifying, as a fraction of the bill.
        escalated_fraction: Fraction of the simple ones whose answer fails, so that the expensive model runs too.
    """
    for name, value in (("simple", simple_fraction), ("router", router_overhead), ("redone", escalated_fraction)):
        if not 0 <= value <= 1:
            raise WorkbenchError(f"routing: {name} is {value}; it is a share, from 0 to 1")
    if times_cheaper < 1:
        raise WorkbenchError(f"routing: {times_cheaper} times cheaper; give 1 or more")
    return Fraction(simple_fraction) * (1 - 1 / Fraction(times_cheaper) - Fraction(escalated_fraction)) - Fraction(router_overhead)


def simple_fraction_for_saving(goal: Share, times_cheaper: Share, router: Share = 0, redone: Share = 0) -> Fraction | None:
    """Return the fraction of the bill that must be simple for routing to save `goal` of it; None where all is too
    little."""
    kept = 1 - 1 / Fraction(times_cheaper) - Fraction(redone)
    needed = (Fraction(goal) + Fraction(router)) / kept if kept > 0 else Fraction(2)
    return needed if needed <= 1 else None


def cheapest_first_saving(share: Share, times_cheaper: Share, costs: Iterable[Fraction]) -> float:
    """Return the fraction of the bill saved if the cheapest `share` of the questions are simple; 0 for none."""
    ordered = sorted(costs)
    whole = sum(ordered, Fraction(0))
    routed = sum(ordered[: int(Fraction(share) * len(ordered))], Fraction(0))
    return float(routing_saving(routed / whole, times_cheaper)) if whole else 0.0


def question_fraction_for_saving(goal: Share, times_cheaper: Share, costs: Iterable[Fraction]) -> float | None:
    """Return the fraction of the questions, cheapest first, that must be simple to save `goal`; None where all are too
    few.

    Short questions are many and cost little, so this exceeds their fraction of the bill."""
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
