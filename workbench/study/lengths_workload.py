"""Settings of the lengths workload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, ExperimentSettings, Seed


class LengthsWorkload(ExperimentSettings):
    """Requests of random tokens, each alone on the machine: pairs of prompt tokens and output tokens.

    Every round runs all lengths of all variants in turn; one warm-up round comes first."""

    kind: Literal["lengths"] = "lengths"
    lengths: Annotated[tuple[tuple[Count, Annotated[int, Field(ge=2)]], ...], Field(min_length=1)]
    rounds: Count = 3
    seed: Seed = 0
