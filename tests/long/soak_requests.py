"""Random requests for a soak: mixed lengths, shared beginnings, stops, samples, beams, priorities."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from workbench.request import Request, SamplingParameters
from workbench.simulate.arrival import request_from_arrival
from workbench.simulate.source import source_of
from workbench.simulate.traffic_settings import AtOnce, ExponentialLengths, SessionLengths, TrafficSettings

STOPS = (("e",), ("\n", "self"), ("))", " return", "0"))
MULTIPLE_OUTPUTS: tuple[dict[str, Any], ...] = ({"n": 2}, {"n": 3}, {"best_of": 3}, {"beams": 2}, {"beams": 3, "n": 2})
SALTS = ("", "", "", "b")


def random_requests(count: int, vocab: int, context: int, seed: int, text: bool = True) -> Iterator[Request]:
    """Yield `count` requests, every other one a turn of a conversation with a shared beginning.

    One in fifty is longer than the context, and is to be refused. Stop strings are used only with `text`.
    """
    draw = random.Random(f"{seed}/asked")
    unit = max(1, context // 64)
    shared = SessionLengths(sessions=8, turns=4, system=4 * unit, question=unit, output=max(4, unit // 2))
    own = ExponentialLengths(prompt=2 * unit, output=max(4, unit // 2))
    traffics = [
        source_of(TrafficSettings(lengths=lengths, arrivals=AtOnce(), requests=count, seed=seed)).initial_arrivals()
        for lengths in (shared, own)
    ]
    for number in range(count):
        arrival = next(traffics[number % 2])
        prompt = min(arrival.prompt_tokens, context // 2)
        if number % 50 == 49:
            prompt, arrival = context + 5, replace(arrival, blocks=())
        arrival = replace(arrival, prompt_tokens=prompt, output_tokens=min(arrival.output_tokens, context // 4))
        request = request_from_arrival(arrival, f"r{number}", vocab)
        sampling = SamplingParameters.model_validate(
            request.sampling.model_dump() | _random_sampling(draw, vocab, text)
        )
        yield replace(request, sampling=sampling, priority=draw.randrange(3), cache_salt=draw.choice(SALTS))


def _random_sampling(draw: random.Random, vocab: int, text: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "temperature": draw.choice([0.0, 0.7, 1.0]), "top_k": draw.choice([0, 20]), "seed": draw.randrange(2**31),
        "ignore_eos": draw.random() < 0.5,
    }  # fmt: skip
    if text and draw.random() < 0.3:
        values["stop"] = draw.choice(STOPS)
    if draw.random() < 0.3:
        values["stop_token_ids"] = tuple(draw.sample(range(vocab), 1 + vocab // 32))
    if draw.random() < 0.2:
        values |= draw.choice(MULTIPLE_OUTPUTS)
        if "beams" in values:  # beams need the unchanged distribution
            values |= {"temperature": 1.0, "top_k": 0, "stop": ()}
    return values
