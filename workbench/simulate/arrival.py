"""One request of a traffic in numbers: arrival time, lengths, and the blocks it shares with others."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters

BLOCK_TOKENS = 512  # of a Mooncake hash id


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a traffic.

    `blocks` name the prompt's blocks of `block_tokens` tokens, the last perhaps not full. Requests whose first blocks
    have equal names begin with the same tokens. A prompt without blocks shares nothing."""

    time: float  # seconds after the traffic began
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    tenant: str = ""  # only requests of one tenant share cached pages
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    priority: int = 0  # the smaller, the sooner
    deadline: float | None = None  # seconds from its arrival within which its last token is wanted
    predicted_tokens: int | None = None  # output tokens that a predictor expects


def scale_arrivals(arrivals: Iterable[Arrival], time: float = 1.0, length: float = 1.0) -> Iterator[Arrival]:
    """Scale gaps between requests by `time` and texts by `length`, at least one token each.

    Blocks keep their names and change their size, so that shared prefixes stay shared. Deadlines stay as they are."""
    if time < 0 or length <= 0:
        raise WorkbenchError(f"time {time}, length {length}: scale time by 0 or more, and lengths by more than 0")
    for arrival in arrivals:
        if time == length == 1:
            yield arrival
            continue
        tokens, block = _times(arrival.prompt_tokens, length), arrival.block_tokens
        if arrival.blocks:
            block, full = _times(block, length), len(arrival.blocks) - 1
            rest = _times(arrival.prompt_tokens - full * arrival.block_tokens, length)
            tokens = full * block + min(rest, block)
        yield replace(
            arrival, time=arrival.time * time, prompt_tokens=tokens, block_tokens=block,
            output_tokens=_times(arrival.output_tokens, length),
        )  # fmt: skip


def request_from_arrival(
    arrival: Arrival,
    request_id: str,
    vocab: int,
    sampling: SamplingParameters = SamplingParameters(),  # noqa: B008 (a frozen value)
) -> Request:
    """Build the runner's request: token ids by the arrival's blocks, and an output of exactly its length."""
    asked = {"max_tokens": arrival.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": (), "n": 1}
    return Request(
        request_id, prompt_ids(arrival, vocab, request_id), sampling.model_copy(update=asked), arrival=arrival.time,
        cache_salt=arrival.tenant, priority=arrival.priority, tenant=arrival.tenant, deadline=arrival.deadline,
        predicted_tokens=arrival.predicted_tokens,
    )  # fmt: skip


def prompt_ids(arrival: Arrival, vocab: int, own: str) -> tuple[int, ...]:
    """Return token ids below `vocab`, the same for the same blocks on every machine; `own` seeds a prompt without
    blocks."""
    if not arrival.blocks:
        return tuple(_tokens(own, arrival.prompt_tokens, vocab))
    ids: list[int] = []
    for block in arrival.blocks:
        ids += _block(block, arrival.block_tokens, vocab)
    return tuple(ids[: arrival.prompt_tokens])


@lru_cache(maxsize=4096)
def _block(name: int, tokens: int, vocab: int) -> tuple[int, ...]:
    return tuple(_tokens(f"block {name}", tokens, vocab))


def _tokens(name: str, count: int, vocab: int) -> list[int]:
    drawn = array("Q")
    drawn.frombytes(hashlib.shake_128(name.encode()).digest(8 * count))
    return [number % vocab for number in drawn]


def _times(count: int, factor: float) -> int:
    return max(1, round(count * factor))
