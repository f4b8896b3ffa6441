"""What a run of one long prompt in the way of others asks for."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from workbench.study.parts import Count, Part, Seed


class InterruptionWorkload(Part):
    """`running` short requests decode; when each has `after` tokens a prompt of `long_tokens` arrives, and a short
    request right behind it. Outputs of the short ones all have `output_tokens`; the long prompt asks for one."""

    kind: Literal["interruption"] = "interruption"
    running: Count = 4
    prompt_tokens: Count = 32  # of a short request
    output_tokens: Count = 64
    after: Count = 8
    long_tokens: Count = 2000
    rounds: Count = 3  # that count, in turn, each with prompts of its own
    seed: Seed = 0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.output_tokens <= self.after:
            raise ValueError(f"output_tokens ({self.output_tokens}) must be above after ({self.after}), or nobody runs")
        return self
