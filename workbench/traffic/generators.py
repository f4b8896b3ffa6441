"""Generators of traffic from tables that `experiments/fit_traffic.py` fitted to public traces. Endless: the hour
repeats."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from workbench.traffic import azure_table as azure
from workbench.traffic import mooncake_table as mooncake
from workbench.traffic.arrival import BLOCK_TOKENS, Arrival
from workbench.traffic.tables import draw_from_quantiles, poisson_times, quantile


def azure_conversations(rng: random.Random) -> Iterator[Arrival]:
    """Yield prompts and outputs as in Azure's trace, an output by the quarter of its prompt; nothing is shared."""
    for number, time in enumerate(poisson_times(azure.COUNTS, azure.WIDTH, rng)):
        share = rng.random()
        outputs = azure.OUTPUT[int(share * len(azure.OUTPUT))]
        yield Arrival(time, max(1, round(quantile(azure.PROMPT, share))), draw_from_quantiles(outputs, rng), str(number))


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
