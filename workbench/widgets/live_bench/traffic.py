"""Draw the requests of an open-loop load: when they arrive, and what each is like."""

from __future__ import annotations

import random
from dataclasses import dataclass

from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters, random_token_ids

SYSTEM_TOKENS = 32  # at the beginning of each prompt: the same for all where the prefix is shared
SHORT_PROMPT, SHORT_OUTPUT = (40, 80), (8, 24)  # tokens, from and to: of a chat, its system prompt included
LONG_PROMPT, LONG_OUTPUT = (320, 448), (4, 12)  # of a document
LONGEST_REQUEST = LONG_PROMPT[1] + max(LONG_OUTPUT[1], SHORT_OUTPUT[1])  # tokens


@dataclass(frozen=True)
class LoadSettings:
    """An open-loop load: Poisson arrivals at `rate` requests a second, whether or not earlier ones have ended."""

    rate: float = 6.0
    long_share: float = 0.1  # of the requests: long prompts with short answers; the others are chats
    shared_prefix: bool = False  # whether all prompts begin with one system prompt

    def __post_init__(self) -> None:
        if not 0 <= self.rate < float("inf"):
            raise WorkbenchError(f"rate must be 0 or more requests a second, not {self.rate}")
        if not 0 <= self.long_share <= 1:
            raise WorkbenchError(f"long_share must be within 0 and 1, not {self.long_share}")


class PoissonArrivals:
    """Arrival times of a Poisson process whose rate may change at any time.

    The next arrival is due when the integral of the rate reaches a number drawn from the exponential distribution, so
    a change of the rate holds at once, also for the arrival that is awaited.
    """

    def __init__(self, start: float, rng: random.Random):
        self._now, self._rng = start, rng
        self._left = rng.expovariate(1.0)  # expected arrivals until the next one

    def advance(self, until: float, rate: float) -> list[float]:
        """Return the arrivals up to `until`, at `rate` a second since the last call."""
        times: list[float] = []
        while rate * (until - self._now) >= self._left:
            self._now += self._left / rate
            self._left = self._rng.expovariate(1.0)
            times.append(self._now)
        self._left -= rate * max(0.0, until - self._now)
        self._now = max(self._now, until)
        return times

    def seconds_to_next(self, rate: float) -> float:
        """Return the seconds from the last call of `advance` to the next arrival at `rate`."""
        return self._left / rate if rate else float("inf")


class RequestSource:
    """Requests of random tokens, greedy, each of exactly its length: what they cost depends on no text."""

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
