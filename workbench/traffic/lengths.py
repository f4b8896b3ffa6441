"""Generators of request lengths and shared blocks, by kind of length settings; at second 0 unless they have times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from workbench.traffic import azure_table, mooncake_table
from workbench.traffic.arrival import Arrival
from workbench.traffic.generators import azure_conversations, mooncake_conversations
from workbench.traffic.settings import Azure, Exponential, Fixed, Mooncake, Sessions

SESSION_BLOCK = 16  # tokens that turns share are whole blocks


def fixed(part: Fixed, draw: random.Random) -> Iterator[Arrival]:
    for number in itertools.count():
        yield Arrival(0.0, part.prompt, part.output, str(number))


def exponential(part: Exponential, draw: random.Random) -> Iterator[Arrival]:
    for number in itertools.count():
        prompt, output = (max(1, round(draw.expovariate(1 / mean))) for mean in (part.prompt, part.output))
        yield Arrival(0.0, prompt, output, str(number))


def sessions(part: Sessions, draw: random.Random) -> Iterator[Arrival]:
    names = itertools.count()
    system = tuple(itertools.islice(names, part.system // SESSION_BLOCK))
    said: list[tuple[int, tuple[int, ...]]] = [(0, system)] * part.sessions  # turns, and blocks of the conversation
    begun = [0] * part.sessions  # conversations of each user
    for _ in itertools.count():
        user = draw.randrange(part.sessions)
        turn, blocks = said[user]
        prompt = part.system + turn * (part.question + part.output) + part.question
        blocks += tuple(itertools.islice(names, -(-prompt // SESSION_BLOCK) - len(blocks)))
        yield Arrival(0.0, prompt, part.output, f"{user}.{begun[user]}", "", blocks, SESSION_BLOCK)
        said[user] = turn + 1, blocks[: prompt // SESSION_BLOCK]
        if turn + 1 == part.turns:
            said[user] = 0, system
            begun[user] += 1


def azure(part: Azure, draw: random.Random) -> Iterator[Arrival]:
    return azure_conversations(draw)


def mooncake(part: Mooncake, draw: random.Random) -> Iterator[Arrival]:
    return mooncake_conversations(draw)


LENGTHS: dict[type, Callable[..., Iterator[Arrival]]] = {
    Fixed: fixed, Exponential: exponential, Sessions: sessions, Azure: azure, Mooncake: mooncake,
}  # fmt: skip
HOURS: dict[type, float] = {Azure: azure_table.SECONDS, Mooncake: mooncake_table.SECONDS}  # those with times
