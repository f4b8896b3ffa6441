"""Quality and cost of attention variants and cache formats, each compared with the same model in float32 with a dense
cache.

Greedy outputs are compared by the first token in which they differ from the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import QualityWorkload
from workbench.experiment.variants import (
    REFERENCE,
    Rows,
    VariantResults,
    every_variant,
    reference_experiment,
    settings_text,
)
from workbench.measure.predictions import Predictions
from workbench.measure.quality.copying import mean_by_depth, measure_copying
from workbench.measure.quality.costs import cache_bytes, measure_capacity, measure_decode_speed, validate_contexts
from workbench.measure.quality.held_out import QualityTexts
from workbench.measure.quality.teacher_forcing import (
    ReferenceLogits,
    TokenDivergences,
    measure_divergence,
    self_divergence,
)
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters

ProgressCallback = Callable[[str], None]


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
        "first_divergence": sum(tokens if place is None else place for place in first_divergences)
        / len(first_divergences),
    }


def measure_quality(
    experiment: Experiment, on_progress: ProgressCallback = lambda line: None, predicted: Predictions | None = None
) -> VariantResults:
    """Measure every variant of an experiment with a quality workload. The reference is the first row.

    `predicted`, from `predict_variants`, is added to the variants' rows."""
    work = cast(QualityWorkload, experiment.workload)
    variants = {REFERENCE: reference_experiment(experiment), **every_variant(experiment)}
    timed = 0 if work.speed is None else 1 + len(work.speed.contexts)
    on_progress = StageCounter(on_progress, 2 + len(variants) * (1 + timed))
    if work.speed is not None:
        validate_contexts(variants, work.speed)
    fits = measure_capacity(variants, work.pool) if work.pool is not None else [{}] * len(variants)
    on_progress("loading")
    exact = runner_for(variants[REFERENCE])
    if exact.tokenizer is None:
        raise WorkbenchError(f"quality: model {experiment.model.name!r} has no tokenizer, so it can score no text")
    texts = QualityTexts.from_workload(work, exact.tokenizer, exact.model.spec.max_position_embeddings)
    on_progress("reference")
    reference = ReferenceLogits.compute(exact, texts.scored)
    spoken = greedy_outputs(exact, texts.prompts, work.greedy_tokens)
    found = VariantResults([], texts.metadata, {"places": [], "greedy": [], "copying": []})
    for name, variant in variants.items():
        on_progress(name)
        known = name == REFERENCE  # what it says is known from above
        runner = exact if known else runner_for(variant)
        row: dict[str, Any] = {
            "variant": name,
            "settings": settings_text(experiment, name),
            "backend": str(runner.core.backends),
        }
        row["weight_bytes"] = runner.model.weight_bytes
        if predicted is not None and not known:
            row["predicted"] = predicted["variants"][name]
        places = self_divergence(reference) if known else measure_divergence(runner, reference)
        row |= cache_bytes(runner, texts.windows[0].ids) | places.summary(texts.scored_bytes)
        outputs = spoken if known else greedy_outputs(runner, texts.prompts, work.greedy_tokens)
        row |= _greedy(found, name, spoken, outputs)
        if texts.snippets:
            row |= _copying(found, name, measure_copying(runner, texts.snippets))
        found.tables["places"] += _columns_as_rows(name, places)
        found.rows.append(row | fits[len(found.rows)])
        del runner
    if work.speed is not None:
        found.tables["speed"] = measure_decode_speed(variants, experiment.backend, work.speed, on_progress)
        for row in found.rows:
            mine = [each for each in found.tables["speed"] if each["variant"] == row["variant"]]
            row["decode_backend"] = mine[0]["backend"]
            row["decode_tokens_per_s"] = {str(each["context"]): each["tokens_per_s"] for each in mine}
    return found


def _greedy(found: VariantResults, name: str, spoken: Sequence, outputs: Sequence) -> dict[str, float]:
    parted = [first_divergence(one, other) for one, other in zip(spoken, outputs, strict=True)]
    found.tables["greedy"] += [
        {"variant": name, "prompt": index, "first_divergence": place} for index, place in enumerate(parted)
    ]
    return greedy_divergence_summary(parted, len(spoken[0]))


def _copying(found: VariantResults, name: str, rows: Rows) -> dict[str, Any]:
    found.tables["copying"] += [{"variant": name, **row} for row in rows]
    means = {
        name: sum(row[key] for row in rows) / len(rows) for name, key in (("copied", "copied"), ("copy_gain", "gain"))
    }
    return {**means, "copying": {str(depth): means for depth, means in mean_by_depth(rows).items()}}


def _columns_as_rows(name: str, places: TokenDivergences) -> Rows:
    columns = vars(places)
    return [{"variant": name, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)]
