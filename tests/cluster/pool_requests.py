"""Prompts and engines of the tests of pools."""

from __future__ import annotations

import random

from workbench.engine.config import EngineConfig
from workbench.request import Request, SamplingParameters, random_token_ids

SETTINGS = {"backend": "eager", "page_size": 16, "cache": {"pages": 40, "prefix": "radix"}}


def config(**settings) -> EngineConfig:
    return EngineConfig.build({"name": "demo", "dtype": "float32"}, **{**SETTINGS, **settings})


def requests(seed: int) -> list[Request]:
    """Prompts of which some begin alike, samples that share one, and one that ends with its first token."""
    draw = random.Random(seed)
    common = random_token_ids(draw, 300, 40)
    made = [Request("one", common[:20], SamplingParameters(max_tokens=1, temperature=0, ignore_eos=True))]
    for number in range(5):
        ids = common[: draw.choice([0, 20, 40])] + random_token_ids(draw, 300, draw.randrange(5, 50))
        sampling = SamplingParameters(max_tokens=draw.randrange(2, 24), temperature=0, ignore_eos=True)
        made.append(Request(f"r{number}", ids, sampling))
    drawn = SamplingParameters(max_tokens=6, n=2, temperature=0.8, repetition_penalty=1.2, ignore_eos=True)
    return [*made, Request("many", common, drawn)]
