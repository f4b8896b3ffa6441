"""Generate request lengths and arrival times by kind of settings, also from tables fitted to public traces.

`experiments/fit_traffic.py` fits the tables: quantiles of distributions, and rates over time. Generators are endless:
the hour repeats. Times are seconds and never decrease.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from workbench.simulate.arrival import BLOCK_TOKENS, Arrival
from workbench.simulate.fitted_traffic import AZURE, MOONCAKE
from workbench.simulate.traffic_settings import (
    AtOnce,
    AzureLengths,
    Bursts,
    ExponentialLengths,
    FixedLengths,
    MooncakeLengths,
    Poisson,
    SessionLengths,
)

SESSION_BLOCK = 16  # tokens per block shared by turns
HOURS: dict[type, float] = {
    AzureLengths: AZURE.seconds,
    MooncakeLengths: MOONCAKE.seconds,
}  # generators that also yield times


def quantile(table: Sequence[float], share: float) -> float:
    """Return the value below which a fraction `share` (0 to 1) of the values lies.

    `table` has the values at equally spaced quantiles, ends included."""
    place = share * (len(table) - 1)
    below = min(int(place), len(table) - 2)
    return table[below] + (table[below + 1] - table[below]) * (place - below)


def draw_from_quantiles(table: Sequence[float], rng: random.Random) -> int:
    return max(1, round(quantile(table, rng.random())))


def poisson_times(counts: Sequence[float], width: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process with `counts` arrivals in periods of `width` seconds, repeated forever."""
    due, period = 0.0, 0
    waiting = rng.expovariate(1.0)  # expected arrivals until the next arrival
    while True:
        expected = counts[period % len(counts)] * (1 - due)
        if waiting <= expected:
            due += waiting / counts[period % len(counts)]
            waiting = rng.expovariate(1.0)
            yield (period + due) * width
        else:
            waiting, due, period = waiting - expected, 0.0, period + 1


def arrivals_at_once(settings: AtOnce, rng: random.Random) -> Iterator[float]:
    while True:
        yield 0.0


def poisson_arrivals(settings: Poisson, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(settings.rate)
        yield now


def burst_arrivals(settings: Bursts, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(settings.rate / settings.size)
        for _ in range(settings.size):
            yield now


TIMES: dict[type, Callable[..., Iterator[float]]] = {
    AtOnce: arrivals_at_once,
    Poisson: poisson_arrivals,
    Bursts: burst_arrivals,
}


def azure_conversations(rng: random.Random) -> Iterator[Arrival]:
    """Yield prompts and outputs as in Azure's trace, outputs conditioned on the prompt's quarter; nothing is shared."""
    for number, time in enumerate(poisson_times(AZURE.counts, AZURE.width, rng)):
        share = rng.random()
        outputs = AZURE.output[int(share * len(AZURE.output))]
        yield Arrival(
            time, max(1, round(quantile(AZURE.prompt, share))), draw_from_quantiles(outputs, rng), str(number)
        )


@dataclass
class ConversationHistory:
    """The latest turn of every conversation so far, ordered by time."""

    times: list[float] = field(default_factory=list)
    turns: list[Arrival] = field(default_factory=list)
    blocks: int = 1  # block names used so far; 0 names the shared system prompt

    def nearest_turn(self, time: float) -> int:
        """Return the index of the turn nearest to `time`."""
        at = bisect.bisect(self.times, time)
        around = [i for i in (at - 1, at) if 0 <= i < len(self.times)]
        return min(around, key=lambda i: abs(self.times[i] - time))

    def name_blocks(self, first: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Return names for the blocks of a prompt of `tokens` tokens: the names `first`, then new ones."""
        more = -(-tokens // BLOCK_TOKENS) - len(first)
        self.blocks += more
        return first + tuple(range(self.blocks - more, self.blocks))

    def add(self, turn: Arrival) -> None:
        self.times.append(turn.time)
        self.turns.append(turn)

    def remove(self, at: int) -> None:
        del self.times[at], self.turns[at]


def mooncake_conversations(rng: random.Random) -> Iterator[Arrival]:
    """Yield requests of conversations as in Mooncake's trace, at whole ticks as recorded.

    A request is a new conversation, a next turn after a drawn pause, or a prompt that shares part of an earlier one."""
    known = ConversationHistory()
    for number, moment in enumerate(poisson_times(MOONCAKE.counts, MOONCAKE.width, rng)):
        time = moment // MOONCAKE.tick * MOONCAKE.tick
        kind, output = rng.random(), draw_from_quantiles(MOONCAKE.output, rng)
        turn = None
        if known.turns and kind < MOONCAKE.continued:
            turn = _continued(known, time, output, rng)
        elif known.turns and kind < MOONCAKE.continued + MOONCAKE.partly:
            turn = _partly(known, time, output, rng)
        if turn is None:
            prompt = draw_from_quantiles(MOONCAKE.new, rng)
            turn = Arrival(time, prompt, output, str(number), blocks=known.name_blocks((0,), prompt))
        if turn.prompt_tokens >= 2 * BLOCK_TOKENS:  # a shorter prompt shares only the system prompt's block
            known.add(turn)
        yield turn


def _continued(known: ConversationHistory, time: float, output: int, draw: random.Random) -> Arrival | None:
    """Return the next turn of a conversation, or None where it would exceed the longest recorded prompt."""
    at = known.nearest_turn(time - draw_from_quantiles(MOONCAKE.age, draw))
    last = known.turns[at]
    more = max(1, last.output_tokens + round(quantile(MOONCAKE.growth, draw.random())))
    if last.prompt_tokens + more > MOONCAKE.longest:
        return None
    full = last.blocks[: last.prompt_tokens // BLOCK_TOKENS]
    known.remove(at)
    prompt = last.prompt_tokens + more
    return Arrival(time, prompt, output, last.session, blocks=known.name_blocks(full, prompt))


def _partly(known: ConversationHistory, time: float, output: int, draw: random.Random) -> Arrival:
    """Return a prompt that begins like an earlier one, or equals it if all of it is shared."""
    last = known.turns[known.nearest_turn(time - draw_from_quantiles(MOONCAKE.part_age, draw))]
    shared = max(1, round(len(last.blocks) * quantile(MOONCAKE.part_per_mille, draw.random()) / 1000))
    if shared >= len(last.blocks):
        return Arrival(time, last.prompt_tokens, output, last.session, blocks=last.blocks)
    prompt = shared * BLOCK_TOKENS + draw_from_quantiles(MOONCAKE.part_more, draw)
    return Arrival(time, prompt, output, last.session, blocks=known.name_blocks(last.blocks[:shared], prompt))


def fixed_lengths(settings: FixedLengths, rng: random.Random) -> Iterator[Arrival]:
    for number in itertools.count():
        yield Arrival(0.0, settings.prompt, settings.output, str(number))


def exponential_lengths(settings: ExponentialLengths, rng: random.Random) -> Iterator[Arrival]:
    for number in itertools.count():
        prompt, output = (max(1, round(rng.expovariate(1 / mean))) for mean in (settings.prompt, settings.output))
        yield Arrival(0.0, prompt, output, str(number))


def session_lengths(settings: SessionLengths, rng: random.Random) -> Iterator[Arrival]:
    names = itertools.count()
    system = tuple(itertools.islice(names, settings.system // SESSION_BLOCK))
    said: list[tuple[int, tuple[int, ...]]] = [(0, system)] * settings.sessions  # (turns, blocks) by user
    begun = [0] * settings.sessions  # conversations begun by each user
    for _ in itertools.count():
        user = rng.randrange(settings.sessions)
        turn, blocks = said[user]
        prompt = settings.system + turn * (settings.question + settings.output) + settings.question
        blocks += tuple(itertools.islice(names, -(-prompt // SESSION_BLOCK) - len(blocks)))
        yield Arrival(0.0, prompt, settings.output, f"{user}.{begun[user]}", "", blocks, SESSION_BLOCK)
        said[user] = turn + 1, blocks[: prompt // SESSION_BLOCK]
        if turn + 1 == settings.turns:
            said[user] = 0, system
            begun[user] += 1


def azure_lengths(settings: AzureLengths, rng: random.Random) -> Iterator[Arrival]:
    return azure_conversations(rng)


def mooncake_lengths(settings: MooncakeLengths, rng: random.Random) -> Iterator[Arrival]:
    return mooncake_conversations(rng)


LENGTHS: dict[type, Callable[..., Iterator[Arrival]]] = {
    FixedLengths: fixed_lengths,
    ExponentialLengths: exponential_lengths,
    SessionLengths: session_lengths,
    AzureLengths: azure_lengths,
    MooncakeLengths: mooncake_lengths,
}
