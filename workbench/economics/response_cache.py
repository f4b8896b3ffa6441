"""Replay a traffic against a cache of whole responses: at temperature 0 the same request has the same answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from workbench.economics.prices import Prices, Usage
from workbench.errors import WorkbenchError
from workbench.simulate.arrival import Arrival


@dataclass(frozen=True)
class ResponseCacheReplay:
    """The result of replaying a traffic against a response cache: its cost without the cache, and the saving."""

    requests: int
    hits: int
    cost: Fraction  # cost without the cache
    saved: Fraction

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests if self.requests else 0.0

    @property
    def saved_fraction(self) -> float:
        """Return the saving as a fraction of the cost."""
        return float(self.saved / self.cost) if self.cost else 0.0


def replay_response_cache(arrivals: Iterable[Arrival], prices: Prices, size: int = 100_000) -> ResponseCacheReplay:
    """Replay a traffic, in order of time, against a least-recently-used cache of `size` answers.

    The names of a prompt's blocks represent its tokens; a prompt without blocks is unique. Raises WorkbenchError for a
    size below 1."""
    if size < 1:
        raise WorkbenchError(f"a response cache of {size} answers: give room for at least 1")
    answered: OrderedDict[Hashable, None] = OrderedDict()  # the latest last
    cost = saved = Fraction(0)
    requests = hits = 0
    for requests, arrival in enumerate(arrivals, 1):
        alone = prices.cost(Usage(input=arrival.prompt_tokens, output=arrival.output_tokens))
        cost += alone
        key = (arrival.tenant, arrival.blocks, arrival.prompt_tokens) if arrival.blocks else requests
        if key in answered:
            hits += 1
            saved += alone
        answered[key] = None
        answered.move_to_end(key)
        if len(answered) > size:
            answered.popitem(last=False)
    return ResponseCacheReplay(requests, hits, cost, saved)
