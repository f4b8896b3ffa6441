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

from workbench.simulate import azure_table, mooncake_table
from workbench.simulate import azure_table as azure
from workbench.simulate import mooncake_table as mooncake
from workbench.simulate.arrival import BLOCK_TOKENS, Arrival
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

SESSION_BLOCK = 16  # tokens that turns share are whole blocks
HOURS: dict[type, float] = {
    AzureLengths: azure_table.SECONDS,
    MooncakeLengths: mooncake_table.SECONDS,
}  # those with times


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
    waiting = rng.expovariate(1.0)  # how many are expected until the next one comes
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
    """Yield prompts and outputs as in Azure's trace, an output by the quarter of its prompt; nothing is shared."""
    for number, time in enumerate(poisson_times(azure.COUNTS, azure.WIDTH, rng)):
        share = rng.random()
        outputs = azure.OUTPUT[int(share * len(azure.OUTPUT))]
        yield Arrival(
            time, max(1, round(quantile(azure.PROMPT, share))), draw_from_quantiles(outputs, rng), str(number)
        )


@dataclass
class ConversationHistory:
    """The latest turn of every conversation so far, by time."""

    times: list[float] = field(default_factory=list)
    turns: list[Arrival] = field(default_factory=list)
    blocks: int = 1  # names given; 0 is the system prompt's, which all share

    def nearest_turn(self, time: float) -> int:
        """Return the index of the turn nearest to `time`."""
        at = bisect.bisect(self.times, time)
        around = [i for i in (at - 1, at) if 0 <= i < len(self.times)]
        return min(around, key=lambda i: abs(self.times[i] - time))

    def name_blocks(self, first: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Name the blocks of a prompt of `tokens` tokens that begins with the blocks `first`."""
        more = -(-tokens // BLOCK_TOKENS) - len(first)
        self.blocks += more
        return first + tuple(range(self.blocks - more, self.blocks))

    def add(self, turn: Arrival) -> None:
        self.times.append(turn.time)
        self.turns.append(turn)

    def remove(self, at: int) -> None:
        del self.times[at], self.turns[at]


def mooncake_conversations(rng: random.Random) -> Iterator[Arrival]:
    """Yield conversations as in Mooncake's trace, at whole ticks as recorded.

    There are new conversations, next turns after a drawn pause, and prompts that share a part of an earlier one."""
    known = ConversationHistory()
    for number, moment in enumerate(poisson_times(mooncake.COUNTS, mooncake.WIDTH, rng)):
        time = moment // mooncake.TICK * mooncake.TICK
        kind, output = rng.random(), draw_from_quantiles(mooncake.OUTPUT, rng)
        turn = None
        if known.turns and kind < mooncake.CONTINUED:
            turn = _continued(known, time, output, rng)
        elif known.turns and kind < mooncake.CONTINUED + mooncake.PARTLY:
            turn = _partly(known, time, output, rng)
        if turn is None:
            prompt = draw_from_quantiles(mooncake.NEW, rng)
            turn = Arrival(time, prompt, output, str(number), blocks=known.name_blocks((0,), prompt))
        if turn.prompt_tokens >= 2 * BLOCK_TOKENS:  # of a shorter one only the system prompt's block can be shared
            known.add(turn)
        yield turn


def _continued(known: ConversationHistory, time: float, output: int, draw: random.Random) -> Arrival | None:
    """Return the next turn of a conversation, or None where it would exceed the longest recorded prompt."""
    at = known.nearest_turn(time - draw_from_quantiles(mooncake.AGE, draw))
    last = known.turns[at]
    more = max(1, last.output_tokens + round(quantile(mooncake.GROWTH, draw.random())))
    if last.prompt_tokens + more > mooncake.LONGEST:
        return None
    full = last.blocks[: last.prompt_tokens // BLOCK_TOKENS]
    known.remove(at)
    prompt = last.prompt_tokens + more
    return Arrival(time, prompt, output, last.session, blocks=known.name_blocks(full, prompt))


def _partly(known: ConversationHistory, time: float, output: int, draw: random.Random) -> Arrival:
    """Return a prompt with the beginning of an earlier one; where all of it is shared, the same prompt again."""
    last = known.turns[known.nearest_turn(time - draw_from_quantiles(mooncake.PART_AGE, draw))]
    shared = max(1, round(len(last.blocks) * quantile(mooncake.PART_PER_MILLE, draw.random()) / 1000))
    if shared >= len(last.blocks):
        return Arrival(time, last.prompt_tokens, output, last.session, blocks=last.blocks)
    prompt = shared * BLOCK_TOKENS + draw_from_quantiles(mooncake.PART_MORE, draw)
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
    said: list[tuple[int, tuple[int, ...]]] = [(0, system)] * settings.sessions  # turns, and blocks of the conversation
    begun = [0] * settings.sessions  # conversations of each user
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
