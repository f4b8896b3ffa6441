"""Settings of the sampled texts workload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, ExperimentSettings, Seed


class TextsWorkload(ExperimentSettings):
    """Continue held-out prompts with each variant's sampling, `repeats` times, to see whether the same text comes
    again.

    The held-out continuation, random tokens and a loop are references beside the variants."""

    kind: Literal["texts"] = "texts"
    texts: tuple[str, ...] = ()  # files; none: the held-out modules of the demo model's training
    prompts: Count = 8
    prompt_tokens: Count = 96
    output_tokens: Annotated[int, Field(ge=16)] = 256
    repeats: Count = 1
    seed: Seed = 0
