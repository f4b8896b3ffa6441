"""Greedy outputs, and the first token in which they differ from a reference's."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters


def greedy_outputs(runner: Runner, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[tuple[int, ...]]:
    """Return the `tokens` most likely tokens after each prompt."""
    sampling = SamplingParameters(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    ends = generate(runner, [Request(str(index), prompt, sampling) for index, prompt in enumerate(prompts)])
    for name, end in ends.items():
        if end.reason != "length":
            raise WorkbenchError(f"greedy prompt {name}: {end.error or end.reason}")
    return [ends[str(index)].token_ids for index in range(len(prompts))]


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None where all are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def greedy_divergence_summary(first_divergences: Sequence[int | None], tokens: int) -> dict[str, float]:
    """Summarize first divergences. `greedy_equal` is the fraction of equal outputs; these enter the mean with their
    whole length."""
    return {
        "greedy_equal": sum(place is None for place in first_divergences) / len(first_divergences),
        "first_divergence": sum(tokens if place is None else place for place in first_divergences) / len(first_divergences),
    }
