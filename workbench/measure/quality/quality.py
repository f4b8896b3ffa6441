"""Measure quality and cost of attention variants and cache formats, each compared with the same model in float32 with a
dense cache.

Greedy outputs are compared by the first token that differs from the reference output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import (
    Experiment,
    Predictions,
    ProgressCallback,
    Rows,
    ServedRequests,
    VariantResults,
    Workload,
    WorkloadCost,
)
from workbench.experiment.variants import (
    REFERENCE,
    described,
    every_variant,
    reference_experiment,
)
from workbench.experiment.verdict import VariantRows
from workbench.figures.figure import Figure
from workbench.measure import chart as pareto
from workbench.measure.predictions import MeasuredHardware, predict_each, roofline_seconds
from workbench.measure.quality.choices import with_choices
from workbench.measure.quality.copying import (
    CopyingSettings,
    Snippet,
    generate_snippets,
    mean_by_depth,
    measure_copying,
)
from workbench.measure.quality.costs import (
    DecodeSpeedSettings,
    PoolSettings,
    cache_bytes,
    measure_capacity,
    measure_decode_speed,
    validate_contexts,
    with_model,
)
from workbench.measure.quality.held_out import TextsSource, TextWindow, cut_windows, read_texts, sample_windows
from workbench.measure.quality.intervals import difference_over_texts
from workbench.measure.quality.needles import (
    Haystack,
    NeedleSettings,
    make_haystacks,
    measure_needles,
    needle_summary,
)
from workbench.measure.quality.teacher_forcing import (
    ForcedText,
    ReferenceLogits,
    TokenDivergences,
    measure_divergence,
    self_divergence,
)
from workbench.measure.rounds import check_full_length, greedy_sampling
from workbench.measure.simulated import sizes_of, step_cost_of
from workbench.memory.capacity import spec_and_dtype
from workbench.progress import StageCounter
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request
from workbench.settings import Count, Seed
from workbench.units import Measure, rate, share

MIN_PROMPT_TOKENS = 16
PROTOCOL_TEXTS, PROTOCOL_TOKENS, PROTOCOL_QUESTIONS = 200, 100_000, 200  # of a verdict: so many texts or tokens
MAX_REFERENCE_BYTES = 2**31  # logits of the reference that are held at a time


class QualityWorkload(Workload):
    """Compare each variant with the same model in float32 with a dense cache, on held-out text."""

    measures: ClassVar = (
        Measure("bits_per_byte", "bits/byte", "bits/byte", "min"),
        Measure("kl_*", "KL {}", "nats", "min"),
        share("same_top", "same top token"),
        share("greedy_equal"),
        Measure("first_divergence", "first divergence", "tokens", "max"),
        Measure("scored_tokens", "scored tokens", "tokens"),
        share("copied"),
        Measure("copy_gain", "copy gain", "nats/token", "max"),
        share("copying_*_copied", "copied, depth {}"),
        Measure("copying_*_gain", "copy gain, depth {}", "nats/token", "max"),
        Measure("copying_*_distance", "distance, depth {}", "tokens"),
        share("choices_right", "choices right"),
        Measure("choices", "choices"),
        share("needles_right", "needles right"),
        share("needles_floor", "right without needles", None),
        share("needles_*", "needles, {}"),
        Measure("needle_questions", "needles"),
        Measure("difference_bits_per_byte_*", "bits/byte, {}", "bits/byte"),
        Measure("difference_kl_mean_*", "KL, {}", "nats"),
        Measure("difference_choices_right_*", "choices right, {}"),
        Measure("difference_needles_right_*", "needles right, {}"),
        Measure("weight_bytes", "weights", "bytes", "min"),
        Measure("kv_bytes", "KV cache", "bytes", "min"),
        Measure("kv_tokens", "cached tokens measured", "tokens"),
        Measure("bytes_per_token", "KV cache a token", "bytes/token", "min"),
        Measure("stored_bytes_per_token", "lasting KV cache per token", "bytes/token", "min"),
        Measure("sequences", "sequences that fit", "", "max"),
        Measure("sequences_predicted", "predicted sequences that fit", "", "max"),
        Measure("sequence_tokens", "tokens of a sequence that fits", "tokens"),
        Measure("pool_bytes", "page pool", "bytes"),
        rate("decode_tokens_per_s_*", "decode at {}", "tokens"),
    )
    kind: Literal["quality"] = "quality"
    texts: TextsSource = "demo"
    windows: Count = 12  # number of text windows; the first of a text is scored whole, later ones in their second half
    context: Count | None = None  # tokens of a window and of all other measurements; None is the model's maximum
    decode: Count = 64  # number of tokens at the end of each window that are decoded one at a time
    greedy_prompts: Count = 8
    greedy_tokens: Count = 64
    copying: CopyingSettings | None = CopyingSettings()
    choices: int = Field(0, ge=0)  # questions of each window: which of four words comes next
    needles: NeedleSettings | None = None
    speed: DecodeSpeedSettings | None = DecodeSpeedSettings()
    pool: PoolSettings | None = PoolSettings()
    seed: Seed = 0

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure every variant of an experiment with a quality workload. The reference is the first row.

        `predicted`, the result of `predict_variants`, is added to the variants' rows."""
        variants = {REFERENCE: reference_experiment(experiment), **every_variant(experiment)}
        timed = 0 if self.speed is None else 1 + len(self.speed.contexts)
        on_progress = StageCounter(on_progress, 2 + len(variants) * (1 + timed))
        if self.speed is not None:
            validate_contexts(variants, self.speed)
        fits = measure_capacity(variants, self.pool) if self.pool is not None else [{}] * len(variants)
        on_progress("loading")
        exact = runner_for(variants[REFERENCE])
        if exact.tokenizer is None:
            raise WorkbenchError(f"quality: model {experiment.model.name!r} has no tokenizer and cannot score text")
        texts = QualityTexts.from_workload(self, exact.tokenizer, exact.model.spec.max_position_embeddings)
        on_progress("reference")
        batches = list(texts.batches(exact.model.spec.vocab_size))
        runners = {REFERENCE: exact}
        if len(batches) > 1:  # the logits of one batch are held at a time, and every variant is compared with them
            runners |= {name: runner_for(variant) for name, variant in variants.items() if name != REFERENCE}
        places = {name: TokenDivergences() for name in variants}
        held: list[ReferenceLogits] = []  # one batch at a time
        for first, windows in batches:
            held.clear()
            held.append(ReferenceLogits.compute(exact, windows, first))
            for name, runner in runners.items():
                same = name == REFERENCE  # its result is known from above
                places[name].extend(self_divergence(held[0]) if same else measure_divergence(runner, held[0]))
        spoken = greedy_outputs(exact, texts.prompts, self.greedy_tokens)
        floor = measure_needles(exact, [without for _, without in texts.haystacks])
        found = VariantResults([], texts.metadata, {"places": [], "greedy": [], "copying": [], "needles": []})
        for name in variants:
            on_progress(name)
            if (runner := runners.pop(name, None)) is None:  # there was one batch
                runner = runner_for(variants[name])
                places[name].extend(measure_divergence(runner, held[0]))
            row: dict[str, Any] = {**described(experiment, name, runner.core.backends)}
            row["weight_bytes"] = runner.model.weight_bytes
            if predicted and name != REFERENCE:
                row["predicted"] = predicted["variants"][name]
            row |= cache_bytes(runner, texts.windows[0].ids) | places[name].summary(texts.scored_bytes)
            outputs = spoken if name == REFERENCE else greedy_outputs(runner, texts.prompts, self.greedy_tokens)
            row |= _greedy(found, name, spoken, outputs)
            if texts.snippets:
                row |= _copying(found, name, measure_copying(runner, texts.snippets))
            if texts.haystacks:
                needles = measure_needles(runner, [planted for planted, _ in texts.haystacks])
                found.tables["needles"] += [{"variant": name, **each} for each in needles]
                row |= needle_summary(needles, floor)
            if name != REFERENCE:
                row["difference"] = _differences(found, texts, name, places)
            found.tables["places"] += _columns_as_rows(name, places[name])
            found.rows.append(row | fits[len(found.rows)])
            del runner
        if self.speed is not None:
            found.tables["speed"] = measure_decode_speed(variants, experiment.backend, self.speed, on_progress)
            for row in found.rows:
                mine = [each for each in found.tables["speed"] if each["variant"] == row["variant"]]
                row["decode_backend"] = mine[0]["backend"]
                row["decode_tokens_per_s"] = {str(each["context"]): each["tokens_per_s"] for each in mine}
        return found

    def predict(self, experiment: Experiment, on_progress: ProgressCallback) -> Predictions:
        if self.speed is None:
            return super().predict(experiment, on_progress)
        return predict_each(experiment, on_progress, _predict_decode_speed)

    def chart(self, rows: VariantRows, title: str) -> Figure:
        return pareto.chart(rows, title)

    def cost(self, experiment: Experiment) -> WorkloadCost:
        """Return the requests and bytes of a run: scored windows, one sequence to measure memory, greedy outputs and
        copying, for both the reference and the variant."""
        spec = spec_and_dtype(experiment)[0]
        max_context, vocab = spec.max_position_embeddings, spec.vocab_size
        if (self.context or 0) > max_context:
            raise WorkbenchError(f"workload.context {self.context}: above the model's own, {max_context}")
        context = self.context or max_context
        if self.decode + 2 > context:
            raise WorkbenchError(f"workload.decode {self.decode}: must be below the context of {context}")
        lengths: Counter[tuple[int, int]] = Counter()
        lengths[max(1, context - self.decode), self.decode] += self.windows
        lengths[max(1, min(context // 2, context - self.greedy_tokens)), self.greedy_tokens] += self.greedy_prompts
        if self.copying is not None:
            tokens = context * 9 // 10 if self.copying.tokens == "auto" else self.copying.tokens
            lengths[tokens, 1] += self.copying.names * (len(self.copying.depths) + 1)
        served = [ServedRequests(reference_experiment(experiment), lengths), ServedRequests(experiment, lengths)]
        if self.needles is not None:
            lengths[context - 1, 1] += 2 * self.needles.texts
        if self.speed is not None:
            steps = self.speed.tokens * (self.speed.rounds + 1)
            for each, dtype in ((reference_experiment(experiment), None), (experiment, self.speed.dtype)):
                alone = with_model(each, self.speed.model, dtype)
                alone = alone.model_copy(update={"schedule": alone.schedule.model_copy(update={"max_num_seqs": 1})})
                served.append(ServedRequests(alone, dict.fromkeys(((one, steps) for one in self.speed.contexts), 1)))
        logits = self.windows * context * vocab * 4  # bytes of the reference's logits, at most
        return WorkloadCost(tuple(served), other_bytes=min(logits, max(MAX_REFERENCE_BYTES, logits // self.windows)))


@dataclass(frozen=True)
class QualityTexts:
    """The texts of a quality run. `metadata` names their sources for the record."""

    windows: Sequence[TextWindow]
    prompts: Sequence[tuple[int, ...]]
    snippets: Sequence[Snippet]
    haystacks: Sequence[tuple[Haystack, Haystack]]  # with needles, and without
    scored: Sequence[ForcedText]  # the windows: the last tokens of each are decoded one at a time, all others prefilled
    metadata: dict[str, Any]

    @classmethod
    def from_workload(cls, workload: QualityWorkload, tokenizer: Tokenizer, context: int) -> QualityTexts:
        """Build the texts of a workload for a model with this `context`. Raises WorkbenchError if texts are too short
        or cannot be read."""
        if (workload.context or 0) > context:
            raise WorkbenchError(f"workload.context {workload.context}: above the model's own, {context}")
        context = workload.context or context
        texts, about = read_texts(workload.texts)
        if workload.decode + 2 > context:
            raise WorkbenchError(f"workload.decode {workload.decode}: must be below the model's context of {context}")
        least = max(workload.decode + 2, context // 2)
        every = cut_windows(tokenizer, texts, context - 1)
        scored = sample_windows(every, workload.windows, workload.seed, least)
        length = max(1, min(context // 2, context - workload.greedy_tokens))
        beginnings = sample_windows(every, workload.greedy_prompts, workload.seed + 1, MIN_PROMPT_TOKENS)
        asked: Sequence[Snippet] = ()
        if workload.copying is not None:
            tokens = context * 9 // 10 if workload.copying.tokens == "auto" else workload.copying.tokens
            if tokens >= context:
                raise WorkbenchError(
                    f"workload.copying.tokens {tokens}: must be below the model's context of {context}"
                )
            asked = generate_snippets(tokenizer, workload.copying.names, tokens, workload.copying.depths, workload.seed)
        about |= {"windows": sorted({window.name for window in scored}), "context": context}
        about |= _sizes(workload, scored)
        forced = [ForcedText(each.ids, each.first_scored, len(each.ids) - workload.decode) for each in scored]
        forced = with_choices(tokenizer, forced, workload.choices, workload.seed)
        pairs = []
        if workload.needles is not None:
            pairs = make_haystacks(tokenizer, texts, workload.needles, context - 1, workload.seed)
        prompts = [window.ids[:length] for window in beginnings]
        return cls(scored, prompts, asked, pairs, forced, about)

    def batches(self, vocab: int) -> Iterator[tuple[int, Sequence[ForcedText]]]:
        """Cut the windows into batches whose reference logits fit into memory, each with the index of its first."""
        longest = max(len(text.ids) - text.first_scored for text in self.scored)
        size = max(1, MAX_REFERENCE_BYTES // (longest * vocab * 4))
        for first in range(0, len(self.scored), size):
            yield first, self.scored[first : first + size]

    @property
    def scored_bytes(self) -> int:
        return sum(window.num_bytes for window in self.windows)


def _predict_decode_speed(experiment: Experiment, measured_hardware: MeasuredHardware) -> dict[str, Any]:
    """Predict the tokens per second of one decoding sequence, by context length."""
    part = cast(DecodeSpeedSettings, cast(QualityWorkload, experiment.workload).speed)
    timed = with_model(experiment, part.model, part.dtype)
    sizes = sizes_of(timed)
    hardware, cost = measured_hardware(sizes, spec_and_dtype(timed)[1]), step_cost_of(sizes)
    steps = {str(context): roofline_seconds([cost([(context, 1)], 1)], hardware) for context in part.contexts}
    rates = {context: 1 / time for context, time in steps.items()}
    return {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth, "decode_tokens_per_s": rates}


def greedy_outputs(runner: Runner, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[tuple[int, ...]]:
    """Return for each prompt the `tokens` greedy tokens that follow it."""
    sampling = greedy_sampling(tokens)
    ends = generate(runner, [Request(str(index), prompt, sampling) for index, prompt in enumerate(prompts)])
    for name, end in ends.items():
        check_full_length(end, f"greedy prompt {name}")
    return [ends[str(index)].token_ids for index in range(len(prompts))]


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None if all are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def greedy_divergence_summary(first_divergences: Sequence[int | None], tokens: int) -> dict[str, float]:
    """Return a summary of first divergences. `greedy_equal` is the fraction of equal outputs; in the mean divergence
    these count with their full length."""
    return {
        "greedy_equal": sum(place is None for place in first_divergences) / len(first_divergences),
        "first_divergence": sum(tokens if place is None else place for place in first_divergences)
        / len(first_divergences),
    }


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


def _sizes(workload: QualityWorkload, windows: Sequence[TextWindow]) -> dict[str, Any]:
    """Return the sizes of a run as one line, and whether they are those of the protocol."""
    tokens = sum(len(window.ids) - window.first_scored for window in windows)
    questions = 0 if workload.needles is None else workload.needles.texts * workload.needles.each
    line = f"{tokens:,} scored tokens in {len(windows)} windows of {len({each.name for each in windows})} texts"
    enough = len({each.name for each in windows}) >= PROTOCOL_TEXTS or tokens >= PROTOCOL_TOKENS
    if questions:
        line, enough = f"{line}, {questions} needles", enough and questions >= PROTOCOL_QUESTIONS
    return {"sizes": line, "enough": enough}


def _differences(
    found: VariantResults, texts: QualityTexts, name: str, places: Mapping[str, TokenDivergences]
) -> dict[str, dict[str, float]]:
    """Return the differences of a variant from the reference, with intervals: in bits per byte, KL, right choices and
    needles."""
    exact, own = places[REFERENCE], places[name]
    sources = [texts.windows[text].name for text in own.text]
    bits = [(q - p) / math.log(2) for p, q in zip(exact.nats, own.nats, strict=True)]
    bytes_per_token = [each.num_bytes / (len(each.ids) - each.first_scored) for each in texts.windows]
    differences = {
        "bits_per_byte": difference_over_texts(sources, bits, [bytes_per_token[text] for text in own.text]),
        "kl_mean": difference_over_texts(sources, own.kl, [1.0] * len(bits)),
    }
    answers = [
        (source, q - p)
        for source, p, q in zip(sources, exact.chosen, own.chosen, strict=True)
        if p is not None and q is not None
    ]
    needles = {each: [row for row in found.tables["needles"] if row["variant"] == each] for each in (REFERENCE, name)}
    found_again = [(q["text"], q["right"] - p["right"]) for p, q in zip(needles[REFERENCE], needles[name], strict=True)]
    for figure, pairs in (("choices_right", answers), ("needles_right", found_again)):
        if pairs:
            units, values = zip(*pairs, strict=True)
            differences[figure] = difference_over_texts(units, values, [1.0] * len(values))
    return differences


def _columns_as_rows(name: str, places: TokenDivergences) -> Rows:
    columns = vars(places)
    return [{"variant": name, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)]
