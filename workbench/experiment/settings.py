"""Settings of an experiment's workloads and of its sweep, on one strict base class.

Sizes decide how long a workload takes: no clock cuts a run short.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from workbench.agents.limits import Limits
from workbench.request import CustomPart
from workbench.settings import Count, Fraction01, Seed, Settings

Delivery = Literal["whole", "events", "stream"]
UNSWEEPABLE_SETTINGS = ("variants", "sweep", "judge")
Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class OverheadSettings(Settings):
    """Settings for the cost of `batch_invariant`: a prefill of one prompt, decodes of one sequence, decodes of many."""

    model: str | None = None  # None is the model whose outputs are compared
    prefill_tokens: Count = 512
    context: Count = 256  # tokens of each prompt whose decodes are timed
    batch: Annotated[int, Field(ge=2)] = 16
    tokens: Annotated[int, Field(ge=3)] = 12  # output tokens of each sequence
    rounds: Count = 5


class DeterminismWorkload(Settings):
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


class PrefillInterferenceWorkload(Settings):
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


class LengthsWorkload(Settings):
    """Requests of random tokens, each alone on the machine: pairs of prompt tokens and output tokens.

    Every round runs all lengths of all variants in turn; one warm-up round comes first."""

    kind: Literal["lengths"] = "lengths"
    lengths: Annotated[tuple[tuple[Count, Annotated[int, Field(ge=2)]], ...], Field(min_length=1)]
    rounds: Count = 3
    seed: Seed = 0


class CopyingSettings(Settings):
    """Settings of copying: identifiers assigned in generated code at several depths and repeated at its end."""

    names: Count = 4
    tokens: Count | Literal["auto"] = "auto"  # of each text; auto: nine tenths of the model's context
    depths: Annotated[tuple[Fraction01, ...], Field(min_length=1)] = (
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
    )  # 0 is the text's beginning


class DecodeSpeedSettings(Settings):
    """Settings of decode speed: one sequence decodes at each context length, all variants in turn."""

    model: str | None = None  # None is the model whose quality is measured
    dtype: str | None = None
    backend: str | None = None
    contexts: Annotated[tuple[Count, ...], Field(min_length=1)] = (128, 512, 896)
    tokens: Count = 16  # in each round
    rounds: Count = 3


class PoolSettings(Settings):
    """Settings of capacity: a fixed amount of memory, and the context of the sequences that fill it."""

    model: str | None = None
    dtype: str | None = None
    bytes: Count = 2**26
    context: Count | None = None  # None is the model's own


class QualityWorkload(Settings):
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


class SharedPrefixWorkload(Settings):
    """Run requests with a shared prefix and different ends: one after another (TTFT), then all at once (throughput)."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    requests: Count = 8
    prefix_tokens: Count = 1000
    own_tokens: Count = 16
    output_tokens: Count = 8
    rounds: Count = 1
    seed: Seed = 0


class SpeculationWorkload(Settings):
    """Continue prompts of held-out code at several loads (sequences at once), all variants in turn.

    The first variant is the baseline of the others. All outputs have the same length: texts do not end early."""

    kind: Literal["speculation"] = "speculation"
    texts: tuple[str, ...] = ()  # files; none: the held-out modules of the demo model's training
    prompts: Count = 8
    prompt_tokens: Count = 384
    output_tokens: Count = 96
    loads: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8, 16)
    rounds: Count = 3
    seed: Seed = 0


class StreamingWorkload(Settings):
    """Send `requests` at once, all with outputs of full length, to a client in a process of its own.

    `whole`: the client gets each text at its end, and no token is detokenized before. `events`: the same, but every
    token becomes text and an event at once. `stream`: the client gets every token's text as a server-sent event."""

    kind: Literal["streaming"] = "streaming"
    delivery: Delivery = "stream"
    requests: Count = 16
    prompt_tokens: Count = 32
    output_tokens: Count = 128
    rounds: Count = 9  # measured rounds, interleaved, after one warm-up
    seed: Seed = 0


class TextsWorkload(Settings):
    """Continue held-out prompts with each variant's sampling, `repeats` times, to see whether the same text comes
    again.

    The held-out continuation, random tokens and a loop are references beside the variants."""

    kind: Literal["texts"] = "texts"
    texts: tuple[str, ...] = ()  # files; none: the held-out modules of the demo model's training
    prompts: Count = 8
    prompt_tokens: Count = 96
    output_tokens: Annotated[int, Field(ge=16)] = 256
    repeats: Count = 1
    seed: Seed = 0


class TextAgreementWorkload(Settings):
    """Continue held-out prompts with each variant, every request alone, and compare texts and times with those of the
    first variant.

    All outputs have the same length. A warm-up of all variants comes before the measured rounds, each of which begins
    with another variant."""

    kind: Literal["text_agreement"] = "text_agreement"
    texts: tuple[str, ...] = ()  # files; none: the held-out modules of the demo model's training
    prompts: Count = 8
    prompt_tokens: Count = 96
    output_tokens: Annotated[int, Field(ge=2)] = 64
    rounds: Count = 5
    seed: Seed = 0


class AgentQuestion(Settings):
    """A question of an agent, and the texts that a right answer holds: numbers as a whole, other texts word for word.

    Without `wanted`, any answer is right."""

    question: Annotated[str, Field(min_length=1)]
    wanted: tuple[str, ...] = ()
    kind: str = ""  # right answers are counted by kind too
    system: str | None = None  # None is the workload's
    tools: tuple[str, ...] | None = None  # None are the workload's

    @field_validator("wanted", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class AgentWorkload(Settings):
    """Ask an agent each question, one after another, and let it call its tools until it answers.

    Questions are given, or made by a function that is named as custom parts are and returns `AgentQuestion` values.
    The prefix cache is empty when a question begins. `cold_start` answers each round's prompt once more from an empty
    cache, for its TTFT."""

    kind: Literal["agent"] = "agent"
    questions: Annotated[tuple[AgentQuestion, ...], Field(min_length=1)] | CustomPart
    system: str | None = None
    tools: tuple[str, ...] = ()  # functions, as module:function
    tool_choice: Annotated[str, Field(min_length=1)] = "auto"  # auto, none, required, or the name of one tool
    limits: Limits = Limits()
    cold_start: bool = True
    rounds: Count = 1  # measured rounds of all questions, interleaved, after a warm-up with the first question


class Sweep(Settings):
    """A sweep runs every combination of its settings.

    A point is one value of each of the `axes`, one index into each group of `linked` settings (lists of one length that
    advance together), and one of the `overrides`.

        axes: {cache.format: [dense, int8], workload.context: [256, 512]}
        linked: [{schedule.max_num_seqs: [1, 8], workload.requests: [4, 32]}]
        overrides: [{}, {attention.sliding_window: 64, attention.num_sink_tokens: 4}]
        repeat: 3"""

    axes: dict[str, Values] = {}
    linked: tuple[dict[str, Values], ...] = ()
    overrides: tuple[dict[str, Any], ...] = ()
    repeat: Count = 1  # all of it so many times, with other seeds

    @field_validator("linked")
    @classmethod
    def _one_length(cls, groups: tuple[dict[str, Values], ...]) -> tuple[dict[str, Values], ...]:
        for group in groups:
            if len({len(values) for values in group.values()}) > 1:
                lengths = ", ".join(f"{path} has {len(values)}" for path, values in group.items())
                raise ValueError(f"linked settings advance together and need equally many values: {lengths}")
        return groups

    @model_validator(mode="after")
    def _once(self) -> Sweep:
        taken: list[str] = []
        for group in self.groups():
            for path in group:
                if path.split(".")[0] in UNSWEEPABLE_SETTINGS:
                    raise ValueError(f"{path} is no setting of a point and cannot be swept")
                if (other := next((each for each in taken if paths_overlap(each, path)), None)) is not None:
                    raise ValueError(f"{path} is swept twice" + (f", within {other}" if other != path else ""))
            taken += group
        return self

    def groups(self) -> Iterator[list[str]]:
        """Yield the paths that each axis sets, in the order of the axes."""
        yield from ([path] for path in self.axes)
        yield from (list(group) for group in self.linked)
        yield list(dict.fromkeys(path for each in self.overrides for path in each))

    @property
    def one_axis(self) -> tuple[str, tuple[Any, ...]] | None:
        """Return the axis as (path, values) if it is the only one; else None."""
        plain = len(self.axes) == 1 and not self.linked and not self.overrides and self.repeat == 1
        return next(iter(self.axes.items())) if plain else None


def paths_overlap(one: str, other: str) -> bool:
    """Return whether one dotted path equals the other or is its prefix."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
