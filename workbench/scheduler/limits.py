"""Define the limits of every step of a scheduler: sequences, tokens, and how prompts are cut."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from workbench.settings import Count, Settings


class SchedulerLimits(Settings):
    """The settings of a scheduler that limit its steps; `SchedulerConfig` adds further settings."""

    max_num_seqs: Count = 16  # maximum number of running sequences
    max_num_batched_tokens: Count = 512  # maximum tokens of a step
    chunked_prefill: bool = True  # split a prompt that exceeds the step's token budget
    chunk_tokens: Count | None = None  # maximum prefill tokens of a step; None: all its tokens

    @model_validator(mode="after")
    def _chunks_are_possible(self) -> Self:
        if self.chunk_tokens is not None and self.chunk_tokens > self.max_num_batched_tokens:
            within = f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            raise ValueError(f"chunk_tokens must be from 1 to {within}, not {self.chunk_tokens}")
        if self.chunk_tokens is not None and not self.chunked_prefill:
            raise ValueError("chunk_tokens needs chunked_prefill: true; leave one of them out")
        return self

    @property
    def max_chunk_tokens(self) -> int:
        """Return the maximum number of prefill tokens of a step."""
        return self.chunk_tokens or self.max_num_batched_tokens
