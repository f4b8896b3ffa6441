"""What a run of requests of several lengths asks for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, Part, Seed


class LengthsWorkload(Part):
    """Requests of random tokens, each alone on the machine: pairs of prompt tokens and output tokens. Every round has
    all lengths of all variants in turn; one round more, first, does not count."""

    kind: Literal["lengths"] = "lengths"
    lengths: Annotated[tuple[tuple[Count, Annotated[int, Field(ge=2)]], ...], Field(min_length=1)]
    rounds: Count = 3
    seed: Seed = 0
