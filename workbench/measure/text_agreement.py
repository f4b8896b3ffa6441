"""Compare variants by their texts: the first token that differs from the first variant's text, and the time and bytes
per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from compiled_kernels.rounds import interleaved
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, VariantResults
from workbench.experiment.variants import described, every_variant
from workbench.experiment.verdict import VariantRows
from workbench.figures.bars import Bar, IntervalBar, bars, intervals
from workbench.figures.figure import Figure, beside
from workbench.measure.quality.held_out import HeldOutWorkload
from workbench.measure.quality.quality import first_divergence, greedy_divergence_summary
from workbench.measure.rounds import load_runners, run_requests
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters
from workbench.runs.bootstrap import Samples, contrast
from workbench.runs.metrics import TABLES, round_metrics
from workbench.settings import Count
from workbench.svg import Axis
from workbench.trace.recorder import Recorder
from workbench.units import Measure, ratio, share

MEASURES = ("ttft_s_p50", "tpot_s_p50", "kv_bytes_peak")  # measures of a round; a row has their medians over the rounds
Ids = tuple[int, ...]


class TextAgreementWorkload(HeldOutWorkload):
    """Continue held-out prompts with each variant, every request alone, and compare texts and times with those of the
    first variant.

    All outputs have the same length. A warm-up of all variants comes before the measured rounds; each round begins with
    another variant."""

    measures: ClassVar = (
        share("same_texts_share", "same texts"),
        ratio("tpot_ratio", "TPOT ratio"),
        ratio("tpot_ratio_*", "TPOT ratio, {}"),
        ratio("ttft_ratio", "TTFT ratio"),
        Measure("kv_bytes_ratio", "KV cache, ratio", "", "min"),
        share("confidence", "confidence", None),
    )
    kind: Literal["text_agreement"] = "text_agreement"
    output_tokens: Annotated[int, Field(ge=2)] = 64
    rounds: Count = 5

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure every variant and return one row each, compared with the first variant.

        `same_texts_share` is the fraction of prompts whose texts are equal in all tokens, `first_divergence` the mean
        index of the first token that differs (for equal texts their length). `tpot_ratio`, `ttft_ratio` and
        `kv_bytes_ratio` are medians relative to the first variant; the interval of `tpot_ratio` is a bootstrap interval
        over rounds at the level `confidence`."""
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, len(variants) * (2 + self.rounds))
        runners = load_runners(variants, on_progress, {"sampling": SamplingParameters()})
        baseline = next(iter(variants))
        windows, about = self.draw_windows(runners[baseline])
        prompts = [window.ids[: self.prompt_tokens] for window in windows]
        for name, runner in runners.items():
            if runner.model.spec.vocab_size != runners[baseline].model.spec.vocab_size:
                raise WorkbenchError(
                    f"variants.{name}: has a different vocabulary from {baseline}; tokens cannot be compared"
                )
        outputs: dict[str, list[Ids]] = {}
        rounds: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in variants}
        tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        for number, name in interleaved(variants, self.rounds, on_progress, rotate=True):
            recorder = _run_round(runners[name], prompts, variants[name].sampling, self)
            found = {table: getattr(recorder, table)() for table in TABLES}
            outputs.setdefault(name, [tuple(row["token_ids"]) for row in found["requests"] if not row["sample"]])
            if number:
                rounds[name][number] = round_metrics(**found)
                for table in TABLES:
                    tables[table] += [{"variant": name, "round": number, **row} for row in found[table]]
        rows, tables["agreement"] = [], []
        for name in variants:
            places = [first_divergence(one, other) for one, other in zip(outputs[baseline], outputs[name], strict=True)]
            tables["agreement"] += [
                {"variant": name, "prompt": n, "first_divergence": at} for n, at in enumerate(places)
            ]
            rows.append({
                **described(experiment, name, runners[name].core.backends),
                **agreement(places, self.output_tokens), **_medians(rounds[name]),
                **_ratios(rounds[baseline], rounds[name]),
            })  # fmt: skip
        sizes = self.model_dump(mode="json", include={"prompts", "output_tokens", "rounds"})
        return VariantResults(rows, {**about, **sizes}, tables)

    def chart(self, rows: VariantRows, title: str) -> Figure:
        """Draw for each variant the fraction of equal texts, and the ratio of times per token with its interval."""
        shares = [
            Bar(row["variant"], row["same_texts_share"]) for row in rows if row.get("same_texts_share") is not None
        ]
        ratios = [
            IntervalBar(row["variant"], row["tpot_ratio"], row.get("tpot_ratio_low"), row.get("tpot_ratio_high"))
            for row in rows
            if row.get("tpot_ratio") is not None
        ]
        equal = bars(shares, Axis("fraction of prompts with equal texts", percent=True), width=260)
        return beside([equal, intervals(ratios, Axis("time per token / the first variant's"), width=260)], title)


def agreement(places: Sequence[int | None], tokens: int) -> dict[str, float]:
    """Return a summary of the first divergences of texts with `tokens` tokens each; a `None` among `places` is a text
    without divergence."""
    found = greedy_divergence_summary(places, tokens)
    return {"same_texts_share": found.pop("greedy_equal"), **found}


def _run_round(
    runner: Runner, prompts: Sequence[Ids], sampling: SamplingParameters, work: TextAgreementWorkload
) -> Recorder:
    """Run each prompt alone, with an empty prefix index, and return the recorder of the round."""
    recorder = Recorder()
    runner.set_listener(recorder.record)
    try:
        for index, prompt in enumerate(prompts):
            runner.reset_prefix_cache()
            asked = {"max_tokens": work.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": (),
                     "seed": sampling.seed + index}  # fmt: skip
            run_requests(runner, [Request(f"prompt-{index}", prompt, sampling.model_copy(update=asked))], "", False)
    finally:
        runner.set_listener(None)
    for row in recorder.requests():
        if row["finish_reason"] not in ("length", "not_chosen"):
            raise WorkbenchError(f"workload.text_agreement: {row['error'] or row['finish_reason']}")
    return recorder


def _medians(rounds: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    return {name: median(each[name] for each in rounds.values()) for name in MEASURES}


def _ratios(baseline: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ratios of `other` to `baseline`, and the interval of the ratio of times per token."""

    def by_round(side: Mapping[int, Mapping[str, Any]], name: str) -> Samples:
        return {number: float(each[name]) for number, each in side.items()}

    found = {name: contrast(by_round(baseline, name), by_round(other, name)) for name in MEASURES}
    time = found["tpot_s_p50"]
    interval = time.ratio_interval
    return {
        "tpot_ratio": time.ratio,
        "tpot_ratio_low": None if interval is None else interval.low,
        "tpot_ratio_high": None if interval is None else interval.high,
        "confidence": time.confidence,
        "ttft_ratio": found["ttft_s_p50"].ratio,
        "kv_bytes_ratio": found["kv_bytes_peak"].ratio,
    }
