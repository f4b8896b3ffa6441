"""What a run of one prompt in varying company asks for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, Part, Seed


class PricePart(Part):
    """Every variant's times, in turn: a prefill of one prompt, decodes of one sequence, and of many."""

    model: str | None = None  # another one than the one whose answers are compared
    prefill_tokens: Count = 512
    context: Count = 256  # tokens of each prompt whose decodes are timed
    batch: Annotated[int, Field(ge=2)] = 16
    tokens: Annotated[int, Field(ge=3)] = 12  # of each sequence
    rounds: Count = 5


class CompanyWorkload(Part):
    """Each prompt is asked greedily in `runs` companies that differ, and `repeats` times in the first of them."""

    kind: Literal["company"] = "company"
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] | Count = 4  # texts, or how many of random tokens
    prompt_tokens: Count = 48  # of random prompts
    output_tokens: Count = 128
    runs: Count = 8
    repeats: Count = 3
    companions: Count = 15  # at most
    companion_tokens: Count = 96  # of a companion's prompt, and of its output, at most
    price: PricePart | None = PricePart()
    seed: Seed = 0
