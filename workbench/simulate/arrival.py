"""Describe one request of simulated traffic: arrival time, lengths, and blocks shared with other requests."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters

BLOCK_TOKENS = 512  # tokens per Mooncake hash id


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a traffic, as it arrives at a simulated fleet.

    `blocks` name the prompt's blocks of `block_tokens` tokens; the last block may be partial. Prompts with equal names
    of their first blocks begin with the same tokens. A prompt without blocks shares nothing."""

    time: float  # seconds after the start of the traffic
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    tenant: str = ""  # only requests of one tenant share cached pages
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    priority: int = 0  # smaller runs sooner
    deadline: float | None = None  # seconds from arrival to the last token, at most
    predicted_tokens: int | None = None  # predicted output tokens


def scale_arrivals(arrivals: Iterable[Arrival], time: float = 1.0, length: float = 1.0) -> Iterator[Arrival]:
    """Scale the gaps between requests by the factor `time`, and prompt and output lengths by the factor `length` (to at
    least one token).

    Blocks keep their names and change their size, so that shared prefixes stay shared. Deadlines do not change."""
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
    """Build the runner's request for an arrival: its token ids follow from the arrival's blocks, and its output has
    exactly the arrival's length."""
    asked = {"max_tokens": arrival.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": (), "n": 1}
    return Request(
        request_id, prompt_ids(arrival, vocab, request_id), sampling.model_copy(update=asked), arrival=arrival.time,
        cache_salt=arrival.tenant, priority=arrival.priority, tenant=arrival.tenant, deadline=arrival.deadline,
        predicted_tokens=arrival.predicted_tokens,
    )  # fmt: skip


def prompt_ids(arrival: Arrival, vocab: int, own: str) -> tuple[int, ...]:
    """Return token ids below `vocab`, which are the same for equal blocks on every machine; `own` seeds a prompt
    without blocks."""
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
