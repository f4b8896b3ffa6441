"""What a run of generated texts asks for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, Part, Seed


class TextsWorkload(Part):
    """Prompts from text that nobody trained on, continued by each variant's sampling; `repeats` times, to see whether
    the same comes again. Beside the variants stand the text that really came, random tokens, and a loop."""

    kind: Literal["texts"] = "texts"
    texts: tuple[str, ...] = ()  # files; none: the modules that were held out from the demo model's training
    prompts: Count = 8
    prompt_tokens: Count = 96
    output_tokens: Annotated[int, Field(ge=16)] = 256
    repeats: Count = 1
    seed: Seed = 0
