"""Cache whole responses by exact request: at temperature 0 the same request has the same answer."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

from workbench.economics.prices import Prices, Usage
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.simulate.arrival import Arrival

Answer = TypeVar("Answer")
GREEDY = SamplingParameters(temperature=0)


def request_key(request: Request, model: str = "") -> str:
    """Return the cache key of a request: a hash of the model, the prompt's ids, the salt, and the sampling without its
    seed.

    Greedy sampling never uses the seed. Raises WorkbenchError for a temperature above 0, since answers vary."""
    sampling = request.sampling
    if sampling.temperature > 0:
        raise WorkbenchError(
            f"request {request.request_id}: temperature {sampling.temperature:g} samples its answer, so it may "
            "change; only requests at temperature 0 can be cached"
        )
    asked = sampling.model_dump(mode="json", exclude={"seed"})
    whole = json.dumps([model, request.cache_salt, list(request.prompt_ids), asked], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


class ResponseCache(Generic[Answer]):
    """A least-recently-used cache of at most `size` answers of one model."""

    def __init__(self, size: int, model: str = ""):
        if size < 1:
            raise WorkbenchError(f"a response cache of {size} answers: give room for at least 1")
        self.size, self.model = size, model
        self.hits = self.misses = self.evicted = 0
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, request: Request) -> Answer | None:
        """Return the cached answer, or None; count a hit or a miss."""
        key = request_key(request, self.model)
        if key not in self._answers:
            self.misses += 1
            return None
        self.hits += 1
        self._answers.move_to_end(key)
        return self._answers[key]

    def put(self, request: Request, answer: Answer) -> None:
        key = request_key(request, self.model)
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self.size:
            self._answers.popitem(last=False)
            self.evicted += 1

    def get_or_compute(self, request: Request, compute: Callable[[Request], Answer]) -> Answer:
        """Return the cached answer, or compute and cache it. An exception of `compute` is not cached."""
        found = self.get(request)
        if found is None:
            found = compute(request)
            self.put(request, found)
        return found


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


def replay_response_cache(arrivals: Iterable[Arrival], prices: Prices, size: int) -> ResponseCacheReplay:
    """Replay a traffic, in order of time, against a response cache of `size` answers, as if at temperature 0.

    The names of a prompt's blocks represent its tokens; a prompt without blocks is unique."""
    cache: ResponseCache[Fraction] = ResponseCache(size)
    cost = saved = Fraction(0)
    requests = 0
    for requests, arrival in enumerate(arrivals, 1):
        alone = prices.cost(Usage(input=arrival.prompt_tokens, output=arrival.output_tokens))
        cost += alone
        ids = (*arrival.blocks, arrival.prompt_tokens) if arrival.blocks else (-requests,)
        asked = Request(str(requests), ids, GREEDY, cache_salt=arrival.tenant)
        if cache.get(asked) is not None:
            saved += alone
        else:
            cache.put(asked, alone)
    return ResponseCacheReplay(requests, cache.hits, cost, saved)
