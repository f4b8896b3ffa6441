"""Load rates and quantiles fitted to public traces; `experiments/fit_traffic.py` writes and documents the files.

Azure: the LLM inference trace 2023, conversations (CC-BY 4.0; Patel et al., Splitwise, ISCA 2024). Mooncake: its
conversation trace (Apache-2.0; kvcache-ai/Mooncake, FAST 2025).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FittedTraffic:
    """Arrivals fitted to a trace: `counts` has the number of arrivals in each period of `width` seconds, over `seconds`
    in total. All lengths are in tokens."""

    seconds: int
    width: float
    counts: Sequence[int]


@dataclass(frozen=True)
class AzureTraffic(FittedTraffic):
    """Fitted quantiles of prompt lengths, and of output lengths for each quarter of the prompts by length."""

    prompt: Sequence[int]
    output: Sequence[Sequence[int]]


@dataclass(frozen=True)
class MooncakeTraffic(FittedTraffic):
    """A fitted tree of shared prefixes: the fractions of requests that continue an earlier one or share a part of it,
    and quantiles of ages (seconds), growth, shared parts (thousandths of the earlier prompt's blocks) and lengths."""

    tick: int
    continued: float
    partly: float
    age: Sequence[int]
    growth: Sequence[int]
    part_age: Sequence[int]
    part_per_mille: Sequence[int]
    part_more: Sequence[int]
    new: Sequence[int]
    longest: int
    output: Sequence[int]


def _read(name: str) -> dict[str, Any]:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


AZURE, MOONCAKE = AzureTraffic(**_read("azure")), MooncakeTraffic(**_read("mooncake"))
