"""Settings of the prefill interference workload."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from workbench.study.parts import Count, ExperimentSettings, Seed


class PrefillInterferenceWorkload(ExperimentSettings):
    """`running` short requests decode; then one long prompt arrives, and a short request right behind it.

    The long prompt of `long_tokens` arrives when each running request has `after` tokens. Short requests have outputs
    of `output_tokens`, the long one of one token."""

    kind: Literal["prefill_interference"] = "prefill_interference"
    running: Count = 4
    prompt_tokens: Count = 32  # of a short request
    output_tokens: Count = 64
    after: Count = 8
    long_tokens: Count = 2000
    rounds: Count = 3  # measured rounds, interleaved, each with prompts of its own
    seed: Seed = 0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.output_tokens <= self.after:
            raise ValueError(f"output_tokens ({self.output_tokens}) must be above after ({self.after}), or none runs")
        return self
