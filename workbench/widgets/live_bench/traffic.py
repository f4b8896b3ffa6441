"""Sample the requests of an open-loop load: arrival times, prompts and lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters, random_token_ids

SYSTEM_TOKENS = 32  # tokens at the begin of each prompt; equal for all requests with `shared_prefix`
SHORT_PROMPT, SHORT_OUTPUT = (40, 80), (8, 24)  # a chat: smallest and largest number of tokens, with system prompt
LONG_PROMPT, LONG_OUTPUT = (320, 448), (4, 12)  # a document: smallest and largest number of tokens
LONGEST_REQUEST = LONG_PROMPT[1] + max(LONG_OUTPUT[1], SHORT_OUTPUT[1])  # tokens


@dataclass(frozen=True)
class LoadSettings:
    """The settings of an open-loop load: Poisson arrivals at `rate` requests per second, whether or not earlier
    requests have ended."""

    rate: float = 6.0
    long_share: float = 0.1  # fraction of requests with long prompts and short answers; the others are chats
    shared_prefix: bool = False  # whether all prompts begin with one system prompt

    def __post_init__(self) -> None:
        if not 0 <= self.rate < float("inf"):
            raise WorkbenchError(f"rate must be 0 or more requests a second, not {self.rate}")
        if not 0 <= self.long_share <= 1:
            raise WorkbenchError(f"long_share must be within 0 and 1, not {self.long_share}")


class PoissonArrivals:
    """The arrival times of a Poisson process whose rate may change at any time.

    The next arrival is due when the integral of the rate reaches a number drawn from the exponential distribution, so
    a change of the rate also affects the next arrival.
    """

    def __init__(self, start: float, rng: random.Random):
        self._now, self._rng = start, rng
        self._left = rng.expovariate(1.0)  # expected arrivals until the next one

    def advance(self, until: float, rate: float) -> list[float]:
        """Return the arrival times from the last call up to `until`, at `rate` requests a second."""
        times: list[float] = []
        while rate * (until - self._now) >= self._left:
            self._now += self._left / rate
            self._left = self._rng.expovariate(1.0)
            times.append(self._now)
        self._left -= rate * max(0.0, until - self._now)
        self._now = max(self._now, until)
        return times

    def seconds_to_next(self, rate: float) -> float:
        """Return the seconds from the end of the last `advance` to the next arrival, at `rate` requests a second."""
        return self._left / rate if rate else float("inf")


class RequestSource:
    """A source of greedy requests with random tokens and fixed output lengths, so that their cost depends on no
    text."""

    def __init__(self, vocab_size: int, seed: int = 0, name: str = "bench"):
        self._vocab, self._rng, self._name = vocab_size, random.Random(seed), name
        self._system = random_token_ids(random.Random(seed + 1), vocab_size, SYSTEM_TOKENS)
        self.count = 0

    def next_request(self, load: LoadSettings) -> Request:
        is_long = self._rng.random() < load.long_share
        prompt, output = (LONG_PROMPT, LONG_OUTPUT) if is_long else (SHORT_PROMPT, SHORT_OUTPUT)
        ids = random_token_ids(self._rng, self._vocab, self._rng.randint(*prompt))
        if load.shared_prefix:
            ids = self._system + ids[SYSTEM_TOKENS:]
        sampling = SamplingParameters(max_tokens=self._rng.randint(*output), ignore_eos=True, temperature=0)
        self.count += 1
        return Request(f"{self._name}-{self.count} {'long' if is_long else 'chat'}", ids, sampling)
