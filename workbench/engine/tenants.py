"""How much was computed for whom: the virtual counters of Sheng et al., "Fairness in Serving Large Language Models"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from workbench.request import Sequence


class Tenants:
    """Tokens computed for each tenant. One that comes back after an idle time begins where the least served of the
    others is: what it did not use is no credit."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # tokens of sequences that ended, and what was given on coming back
        self._live: Counter[str] = Counter()  # sequences

    def come(self, tenant: str, live: Iterable[Sequence]) -> None:
        """A sequence of `tenant` comes; `live` are those that are here."""
        if not self._live[tenant]:
            others = [name for name, count in self._live.items() if count]
            if others:
                served = self.served(live)
                self._ended[tenant] = max(self._ended[tenant], min(served[name] for name in others))
        self._live[tenant] += 1

    def go(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._ended[tenant] += sequence.computed_tokens
        self._live[tenant] -= 1

    def served(self, live: Iterable[Sequence]) -> Counter[str]:
        served = self._ended.copy()
        for sequence in live:
            served[sequence.request.tenant] += sequence.computed_tokens
        return served
