"""Quality and cost of attention variants and cache formats, each compared with the same model in float32 with a dense
cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from workbench.errors import WorkbenchError
from workbench.stages import Counted
from workbench.study.copying import by_depth, copying
from workbench.study.divergence import Distributions, Places, against_itself, compare
from workbench.study.experiment import Experiment
from workbench.study.findings import Findings, Rows
from workbench.study.greedy import divergence_summary, first_divergence, greedy_outputs
from workbench.study.predicted import Predictions
from workbench.study.quality_costs import capacity, check_speed, kept_bytes, speed
from workbench.study.quality_texts import QualityTexts
from workbench.study.quality_workload import QualityWorkload
from workbench.study.run import runner_for
from workbench.study.variants import REFERENCE, every_variant, reference_of, settings_text

Tell = Callable[[str], None]


def quality(
    experiment: Experiment, tell: Tell = lambda line: None, predicted: Predictions | None = None
) -> Findings:
    """Measure every variant of an experiment with a quality workload. The reference is the first row.

    `predicted`, from `predict_variants`, is added to the variants' rows."""
    work = cast(QualityWorkload, experiment.workload)
    variants = {REFERENCE: reference_of(experiment), **every_variant(experiment)}
    timed = 0 if work.speed is None else 1 + len(work.speed.contexts)
    tell = Counted(tell, 2 + len(variants) * (1 + timed))
    if work.speed is not None:
        check_speed(variants, work.speed)
    fits = capacity(variants, work.pool) if work.pool is not None else [{}] * len(variants)
    tell("loading")
    exact = runner_for(variants[REFERENCE])
    if exact.tokenizer is None:
        raise WorkbenchError(f"quality: model {experiment.model.name!r} has no tokenizer, so it can score no text")
    texts = QualityTexts.of(work, exact.tokenizer, exact.model.spec.context)
    tell("reference")
    reference = Distributions.of(exact, texts.scored)
    spoken = greedy_outputs(exact, texts.prompts, work.greedy_tokens)
    found = Findings([], texts.about, {"places": [], "greedy": [], "copying": []})
    for name, variant in variants.items():
        tell(name)
        known = name == REFERENCE  # what it says is known from above
        runner = exact if known else runner_for(variant)
        row: dict[str, Any] = {"variant": name, "settings": settings_text(experiment, name), "lane": str(runner.lanes)}
        row["weight_bytes"] = runner.model.weight_bytes
        if predicted is not None and not known:
            row["predicted"] = predicted["variants"][name]
        places = against_itself(reference) if known else compare(runner, reference)
        row |= kept_bytes(runner, texts.windows[0].ids) | places.summary(texts.scored_bytes)
        outputs = spoken if known else greedy_outputs(runner, texts.prompts, work.greedy_tokens)
        row |= _greedy(found, name, spoken, outputs)
        if texts.snippets:
            row |= _copying(found, name, copying(runner, texts.snippets))
        found.tables["places"] += _columns_as_rows(name, places)
        found.rows.append(row | fits[len(found.rows)])
        del runner
    if work.speed is not None:
        found.tables["speed"] = speed(variants, experiment.lane, work.speed, tell)
        for row in found.rows:
            mine = [each for each in found.tables["speed"] if each["variant"] == row["variant"]]
            row["decode_lane"] = mine[0]["lane"]
            row["decode_tokens_per_s"] = {str(each["context"]): each["tokens_per_s"] for each in mine}
    return found


def _greedy(found: Findings, name: str, spoken: Sequence, outputs: Sequence) -> dict[str, float]:
    parted = [first_divergence(one, other) for one, other in zip(spoken, outputs, strict=True)]
    found.tables["greedy"] += [
        {"variant": name, "prompt": index, "first_divergence": place} for index, place in enumerate(parted)
    ]
    return divergence_summary(parted, len(spoken[0]))


def _copying(found: Findings, name: str, rows: Rows) -> dict[str, Any]:
    found.tables["copying"] += [{"variant": name, **row} for row in rows]
    means = {
        name: sum(row[key] for row in rows) / len(rows) for name, key in (("copied", "copied"), ("copy_gain", "gain"))
    }
    return {**means, "copying": {str(depth): means for depth, means in by_depth(rows).items()}}


def _columns_as_rows(name: str, places: Places) -> Rows:
    columns = vars(places)
    return [{"variant": name, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)]
