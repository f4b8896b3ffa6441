"""Settings of the speculation workload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, ExperimentSettings, Seed


class SpeculationWorkload(ExperimentSettings):
    """Continue prompts of held-out code at several loads (sequences at once), all variants in turn.

    The first variant is the baseline of the others. All outputs have the same length: texts do not end early."""

    kind: Literal["speculation"] = "speculation"
    texts: tuple[str, ...] = ()  # files; none: the held-out modules of the demo model's training
    prompts: Count = 8
    prompt_tokens: Count = 384
    output_tokens: Count = 96
    loads: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8, 16)
    rounds: Count = 3
    seed: Seed = 0
