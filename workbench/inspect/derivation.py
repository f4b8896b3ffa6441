"""One number as a sum of products."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DerivationTerm:
    """One product: its factors in the order of `Derivation.factors`."""

    name: str
    factors: tuple[float, ...]

    @property
    def product(self) -> float:
        return math.prod(self.factors)


@dataclass(frozen=True)
class Derivation:
    """`value` as the sum of the products of `terms`, in float64 from the recorded tensors. Where no terms are there,
    `note` says why. `factors` names what is multiplied."""

    formula: str
    value: float
    factors: tuple[str, ...] = ()
    terms: tuple[DerivationTerm, ...] = ()
    note: str = ""

    @property
    def total(self) -> float:
        return math.fsum(term.product for term in self.terms)

    def largest(self, count: int) -> tuple[DerivationTerm, ...]:
        """Return the terms that weigh most, the largest first."""
        return tuple(sorted(self.terms, key=lambda term: -abs(term.product))[:count])
