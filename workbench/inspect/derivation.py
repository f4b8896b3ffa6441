"""Represent one number of a forward pass as a sum of products."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DerivationTerm:
    """One product of a `Derivation`, as its factors, in the order of `Derivation.factors`."""

    name: str
    factors: tuple[float, ...]

    @property
    def product(self) -> float:
        return math.prod(self.factors)


@dataclass(frozen=True)
class Derivation:
    """A number, `value`, as the sum of the products `terms`, computed in float64 from the recorded tensors. `factors`
    has the names of a product's factors. Without terms, `note` gives the reason.
    """

    formula: str
    value: float
    factors: tuple[str, ...] = ()
    terms: tuple[DerivationTerm, ...] = ()
    note: str = ""

    @property
    def total(self) -> float:
        return math.fsum(term.product for term in self.terms)

    def largest(self, count: int) -> tuple[DerivationTerm, ...]:
        """Return the `count` terms of largest magnitude, largest first."""
        return tuple(sorted(self.terms, key=lambda term: -abs(term.product))[:count])
