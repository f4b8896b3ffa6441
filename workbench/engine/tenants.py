"""Count computed tokens by tenant: the virtual counters of Sheng et al., "Fairness in Serving Large
Language Models"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from workbench.request import Sequence


class TenantCounters:
    """Tokens computed for each tenant. A tenant that returns after an idle time is lifted to the least served of the
    others."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # tokens of finished sequences, and lifts on return
        self._live: Counter[str] = Counter()  # sequences
        self._returned: list[tuple[str, list[str]]] = []  # tenants that returned since the last step, with those present

    def add(self, tenant: str) -> None:
        """Count a new sequence of `tenant`."""
        if not self._live[tenant]:
            self._returned.append((tenant, [name for name, count in self._live.items() if count]))
        self._live[tenant] += 1

    def lift_returned(self, live: Iterable[Sequence]) -> None:
        """Lift the counters of tenants that returned; `live` are all unfinished sequences.

        Call it before a step is planned: while earlier steps run, their tokens are not known.
        """
        served = self.served_tokens(live) if self._returned else Counter[str]()
        for tenant, others in self._returned:
            if others:
                self._ended[tenant] = max(self._ended[tenant], min(served[name] for name in others))
                served[tenant] = self._ended[tenant]
        self._returned.clear()

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._ended[tenant] += sequence.computed_tokens
        self._live[tenant] -= 1

    def served_tokens(self, live: Iterable[Sequence]) -> Counter[str]:
        served = Counter[str]()
        dict.update(served, self._ended)  # a Counter's own goes through all it has
        here: dict[str, int] = {}
        for sequence in live:
            tenant = sequence.request.tenant
            here[tenant] = here.get(tenant, 0) + sequence.computed_tokens
        for tenant, tokens in here.items():
            served[tenant] += tokens
        return served
