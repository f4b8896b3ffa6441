"""Settings of the determinism workload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, ExperimentSettings, Seed


class OverheadSettings(ExperimentSettings):
    """Settings for the cost of `batch_invariant`: a prefill of one prompt, decodes of one sequence, decodes of many."""

    model: str | None = None  # None is the model whose outputs are compared
    prefill_tokens: Count = 512
    context: Count = 256  # tokens of each prompt whose decodes are timed
    batch: Annotated[int, Field(ge=2)] = 16
    tokens: Annotated[int, Field(ge=3)] = 12  # output tokens of each sequence
    rounds: Count = 5


class DeterminismWorkload(ExperimentSettings):
    """Run each prompt greedily in `runs` different batch compositions, and `repeats` times in the first of them."""

    kind: Literal["determinism"] = "determinism"
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] | Count = 4  # texts, or the number of random prompts
    prompt_tokens: Count = 48  # of random prompts
    output_tokens: Count = 128
    runs: Count = 8
    repeats: Count = 3
    other_requests: Count = 15  # at most
    other_request_tokens: Count = 96  # maximum of another request's prompt, and of its output
    price: OverheadSettings | None = OverheadSettings()
    seed: Seed = 0
