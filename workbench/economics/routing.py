"""What routing saves: simple questions to a cheaper model, the others to the one that all went to."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from workbench.errors import WorkbenchError

Share = Fraction | float


def saving(simple: Share, times_cheaper: Share, router: Share = 0, redone: Share = 0) -> Fraction:
    """The share of the bill that routing saves. `simple` is the share of the bill (not of the questions) that goes to a
    model so many times cheaper, `router` what classifying costs as a share of the bill, `redone` the share of the
    simple ones whose answer will not do, so that the dear model is asked after all."""
    for name, value in (("simple", simple), ("router", router), ("redone", redone)):
        if not 0 <= value <= 1:
            raise WorkbenchError(f"routing: {name} is {value}; it is a share, from 0 to 1")
    if times_cheaper < 1:
        raise WorkbenchError(f"routing: {times_cheaper} times cheaper; give 1 or more")
    return Fraction(simple) * (1 - 1 / Fraction(times_cheaper) - Fraction(redone)) - Fraction(router)


def simple_to_save(goal: Share, times_cheaper: Share, router: Share = 0, redone: Share = 0) -> Fraction | None:
    """The share of the bill that must be simple for routing to save `goal` of it; None where even all is too little."""
    kept = 1 - 1 / Fraction(times_cheaper) - Fraction(redone)
    needed = (Fraction(goal) + Fraction(router)) / kept if kept > 0 else Fraction(2)
    return needed if needed <= 1 else None


def saving_of_cheapest(share: Share, times_cheaper: Share, costs: Iterable[Fraction]) -> float:
    """The share of the bill that is saved where `share` of the questions, the cheapest ones, are simple; 0 of none."""
    ordered = sorted(costs)
    whole = sum(ordered, Fraction(0))
    routed = sum(ordered[: int(Fraction(share) * len(ordered))], Fraction(0))
    return float(saving(routed / whole, times_cheaper)) if whole else 0.0


def questions_to_save(goal: Share, times_cheaper: Share, costs: Iterable[Fraction]) -> float | None:
    """The share of the questions that must be simple, where the cheapest are the simple ones; None where all are too
    few. Short questions are many and cost little, so this is more than their share of the bill."""
    ordered = sorted(costs)
    whole = sum(ordered, Fraction(0))
    needed = simple_to_save(goal, times_cheaper)
    if needed is None or not whole:
        return None
    routed = Fraction(0)
    for count, cost in enumerate(ordered, 1):
        routed += cost
        if routed >= needed * whole:
            return count / len(ordered)
    return None
