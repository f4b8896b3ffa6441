"""Generators of request lengths and shared blocks, by kind of length settings; at second 0 unless they have times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from workbench.traffic import azure_table, mooncake_table
from workbench.traffic.arrival import Arrival
from workbench.traffic.generators import azure_conversations, mooncake_conversations
from workbench.traffic.settings import AzureLengths, ExponentialLengths, FixedLengths, MooncakeLengths, SessionLengths

SESSION_BLOCK = 16  # tokens that turns share are whole blocks


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
    FixedLengths: fixed_lengths, ExponentialLengths: exponential_lengths, SessionLengths: session_lengths, AzureLengths: azure_lengths, MooncakeLengths: mooncake_lengths,
}  # fmt: skip
HOURS: dict[type, float] = {AzureLengths: azure_table.SECONDS, MooncakeLengths: mooncake_table.SECONDS}  # those with times
