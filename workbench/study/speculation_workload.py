"""What a run of speculation asks for: prompts of code that nobody trained on, continued by several at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, Part, Seed


class SpeculationWorkload(Part):
    """Prompts continued at several loads (sequences at once), all variants in turn, the first of which is the one that
    the others are held against. Lengths are the same for all: texts do not end early."""

    kind: Literal["speculation"] = "speculation"
    texts: tuple[str, ...] = ()  # files; none: the modules that were held out from the demo model's training
    prompts: Count = 8
    prompt_tokens: Count = 384
    output_tokens: Count = 96
    loads: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8, 16)
    rounds: Count = 3
    seed: Seed = 0
