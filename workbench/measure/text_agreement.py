"""Two settings compared by their texts: where each differs from the first variant's, and what a token takes and
stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, cast

from compiled_kernels.rounds import interleaved
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import TextAgreementWorkload
from workbench.experiment.variants import VariantResults, described, every_variant
from workbench.measure.chart import import_altair
from workbench.measure.quality.held_out import cut_windows, read_texts, sample_windows
from workbench.measure.quality.quality import first_divergence
from workbench.measure.rounds import load_runners, run_requests
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters
from workbench.runs.bootstrap import Samples, contrast
from workbench.runs.metrics import TABLES, round_metrics
from workbench.trace.recorder import Recorder

MEASURES = ("ttft_s_p50", "tpot_s_p50", "kv_bytes_peak")  # of a round; a row has their medians over the rounds
Ids = tuple[int, ...]
Rows = Sequence[Mapping[str, Any]]


def measure_text_agreement(experiment: Experiment, on_progress: Callable[[str], None]) -> VariantResults:
    """Measure every variant and return one row each, compared with the first variant.

    `same_texts_share` is the share of prompts whose texts are equal in all tokens, `first_divergence` the mean index of
    the first token that differs (equal texts count with their length). `tpot_ratio`, `ttft_ratio` and `kv_bytes_ratio`
    are medians over the first variant's; the interval of `tpot_ratio` is a bootstrap over rounds, with `confidence`."""
    work = cast(TextAgreementWorkload, experiment.workload)
    variants = every_variant(experiment)
    on_progress = StageCounter(on_progress, len(variants) * (2 + work.rounds))
    runners = load_runners(variants, on_progress, {"sampling": SamplingParameters()})
    baseline = next(iter(variants))
    prompts, about = _prompts(runners[baseline], work)
    for name, runner in runners.items():
        if runner.model.spec.vocab_size != runners[baseline].model.spec.vocab_size:
            raise WorkbenchError(f"variants.{name}: has another vocabulary than {baseline}; tokens cannot be compared")
    outputs: dict[str, list[Ids]] = {}
    rounds: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in variants}
    tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for number, name in interleaved(variants, work.rounds, on_progress, rotate=True):
        recorder = _run_round(runners[name], prompts, variants[name].sampling, work)
        found = {table: getattr(recorder, table)() for table in TABLES}
        outputs.setdefault(name, [tuple(row["token_ids"]) for row in found["requests"] if not row["sample"]])
        if number:
            rounds[name][number] = round_metrics(**found)
            for table in TABLES:
                tables[table] += [{"variant": name, "round": number, **row} for row in found[table]]
    rows, tables["agreement"] = [], []
    for name in variants:
        places = [first_divergence(one, other) for one, other in zip(outputs[baseline], outputs[name], strict=True)]
        tables["agreement"] += [{"variant": name, "prompt": n, "first_divergence": at} for n, at in enumerate(places)]
        rows.append({
            **described(experiment, name, runners[name].core.backends),
            **agreement(places, work.output_tokens), **_medians(rounds[name]),
            **_ratios(rounds[baseline], rounds[name]),
        })  # fmt: skip
    sizes = work.model_dump(mode="json", include={"prompts", "output_tokens", "rounds"})
    return VariantResults(rows, {**about, **sizes}, tables)


def agreement(places: Sequence[int | None], tokens: int) -> dict[str, float]:
    """Summarize the first divergences of texts of `tokens` tokens; None is a text without one."""
    return {
        "same_texts_share": sum(at is None for at in places) / len(places),
        "first_divergence": sum(tokens if at is None else at for at in places) / len(places),
    }


def _prompts(runner: Runner, work: TextAgreementWorkload) -> tuple[list[Ids], dict[str, Any]]:
    if runner.tokenizer is None:
        raise WorkbenchError("workload.kind text_agreement: the model has no tokenizer, so no text can be its prompt")
    texts, about = read_texts(work.texts)
    windows = cut_windows(runner.tokenizer, texts, work.prompt_tokens)
    chosen = sample_windows(windows, work.prompts, work.seed, work.prompt_tokens)
    return [window.ids[: work.prompt_tokens] for window in chosen], about


def _run_round(
    runner: Runner, prompts: Sequence[Ids], sampling: SamplingParameters, work: TextAgreementWorkload
) -> Recorder:
    """Run each prompt alone, with an empty prefix index, and return what was recorded."""
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
    """Return the ratios of `other` over `baseline`, and the interval of that of the time per token."""

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


def chart(rows: Rows, title: str) -> Any:
    """Draw Altair charts by variant: the share of equal texts, and the ratio of times per token with its interval."""
    altair = import_altair()
    values = [{key: row.get(key) for key in ("variant", "same_texts_share", "tpot_ratio", "tpot_ratio_low",
                                             "tpot_ratio_high")} for row in rows]  # fmt: skip
    base = altair.Chart(altair.Data(values=values)).encode(y=altair.Y("variant:N", sort=None, title=None))
    share = base.mark_bar(color="#0b6e4f").encode(
        x=altair.X("same_texts_share:Q", scale=altair.Scale(domain=[0, 1]), axis=altair.Axis(format="%"),
                   title="prompts whose texts are equal"),
    )  # fmt: skip
    ends = {"x": altair.X("tpot_ratio_low:Q", scale=altair.Scale(zero=False), title="time per token, over the first's")}
    bars = base.transform_filter("isValid(datum.tpot_ratio_low)").mark_rule().encode(x2="tpot_ratio_high:Q", **ends)
    dots = base.mark_point(filled=True, size=60, color="#0b6e4f").encode(x="tpot_ratio:Q")
    return altair.hconcat(
        share.properties(width=260, height=altair.Step(26)), (bars + dots).properties(width=260, height=altair.Step(26))
    ).properties(title=title)
