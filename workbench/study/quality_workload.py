"""Settings of the quality and shared-prefix workloads. Sizes decide the duration: no clock cuts a run short."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, ExperimentSettings, Seed, Fraction01


class CopyingSettings(ExperimentSettings):
    """Settings of copying: identifiers assigned in generated code at several depths and repeated at its end."""

    names: Count = 4
    tokens: Count | Literal["auto"] = "auto"  # of each text; auto: nine tenths of the model's context
    depths: Annotated[tuple[Fraction01, ...], Field(min_length=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0 is the text's beginning


class DecodeSpeedSettings(ExperimentSettings):
    """Settings of decode speed: one sequence decodes at each context length, all variants in turn."""

    model: str | None = None  # None is the model whose quality is measured
    dtype: str | None = None
    backend: str | None = None
    contexts: Annotated[tuple[Count, ...], Field(min_length=1)] = (128, 512, 896)
    tokens: Count = 16  # in each round
    rounds: Count = 3


class PoolSettings(ExperimentSettings):
    """Settings of capacity: a fixed amount of memory, and the context of the sequences that fill it."""

    model: str | None = None
    dtype: str | None = None
    bytes: Count = 2**26
    context: Count | None = None  # None is the model's own


class QualityWorkload(ExperimentSettings):
    """Compare each variant with the same model in float32 with a dense cache, on held-out text."""

    kind: Literal["quality"] = "quality"
    texts: tuple[str, ...] = ()  # files; none: the held-out modules of the demo model's training
    windows: Count = 12  # stretches of text; the second half of each is scored
    context: Count | None = None  # tokens of a window and of all measurements here; None is the model's maximum
    decode: Count = 64  # tokens at the end of each window that are computed one at a time
    greedy_prompts: Count = 8
    greedy_tokens: Count = 64
    copying: CopyingSettings | None = CopyingSettings()
    speed: DecodeSpeedSettings | None = DecodeSpeedSettings()
    pool: PoolSettings | None = PoolSettings()
    seed: Seed = 0


class SharedPrefixWorkload(ExperimentSettings):
    """Run requests with a shared prefix and different ends: one after another (TTFT), then all at once (throughput)."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    requests: Count = 8
    prefix_tokens: Count = 1000
    own_tokens: Count = 16
    output_tokens: Count = 8
    rounds: Count = 1
    seed: Seed = 0
