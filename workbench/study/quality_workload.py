"""What a run of quality and cost asks for. Sizes decide how long it takes: nothing is cut by a clock."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workbench.study.parts import Count, Part, Seed, Share


class CopyingPart(Part):
    """Identifiers assigned in generated code and asked for at its end, at several depths."""

    names: Count = 4
    tokens: Count | Literal["auto"] = "auto"  # of each text; auto: nine tenths of the model's context
    depths: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0 is the text's beginning


class SpeedPart(Part):
    """One sequence that decodes after so many tokens; all variants in turn."""

    model: str | None = None  # another one than the one whose quality is measured
    dtype: str | None = None
    lane: str | None = None
    contexts: Annotated[tuple[Count, ...], Field(min_length=1)] = (128, 512, 896)
    tokens: Count = 16  # in each round
    rounds: Count = 3


class PoolPart(Part):
    """A memory of fixed size, and how long the sequences are that it is filled with."""

    model: str | None = None
    dtype: str | None = None
    bytes: Count = 2**26
    context: Count | None = None  # None is the model's own


class QualityWorkload(Part):
    """Each variant held against the same model in float32 with a dense cache, on text nobody trained on."""

    kind: Literal["quality"] = "quality"
    texts: tuple[str, ...] = ()  # files; none: the modules that were held out from the demo model's training
    windows: Count = 12  # stretches of text; the second half of each is scored
    context: Count | None = None  # tokens of a window, and of all that is asked here; None is the model's own
    decode: Count = 64  # tokens at the end of each window that are computed one at a time
    greedy_prompts: Count = 8
    greedy_tokens: Count = 64
    copying: CopyingPart | None = CopyingPart()
    speed: SpeedPart | None = SpeedPart()
    pool: PoolPart | None = PoolPart()
    seed: Seed = 0


class SharedPrefixWorkload(Part):
    """Requests that begin alike and end differently: one after another (TTFT), then all at once (throughput)."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    requests: Count = 8
    prefix_tokens: Count = 1000
    own_tokens: Count = 16
    output_tokens: Count = 8
    rounds: Count = 1
    seed: Seed = 0
