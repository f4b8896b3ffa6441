"""Measure serving: all variants run the same requests in turn. The chart shows latency against throughput, and each
variant's rate with its upper bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from workbench.engine.config import ModelConfig
from workbench.engine.inputs import make_request
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.build import clients_of, requests_of
from workbench.experiment.experiment import (
    Experiment,
    Predictions,
    ProgressCallback,
    ServedRequests,
    VariantResults,
    Workload,
    WorkloadCost,
)
from workbench.experiment.variants import described, every_variant
from workbench.experiment.verdict import VariantRows
from workbench.figures.bars import Bar, bars
from workbench.figures.figure import Figure, beside
from workbench.figures.points import Point, points
from workbench.measure.chart import axis_title
from workbench.measure.predictions import MeasuredHardware, predict_each, roofline_seconds
from workbench.measure.rounds import load_runners, run_requests
from workbench.measure.simulated import fleet_for, fleet_metrics, sizes_of, step_cost_of
from workbench.measure.simulation import measure_simulated_variants, tokenizer_of
from workbench.memory.capacity import spec_and_dtype
from workbench.model.cost import StepCostModel
from workbench.progress import StageCounter
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request, random_token_ids
from workbench.runs.metrics import TABLES, round_metrics
from workbench.settings import Count, Seed
from workbench.simulate.arrival import Arrival, request_from_arrival
from workbench.simulate.executor_settings import SimulatedExecutor, UncachedExecutor
from workbench.simulate.roofline import Hardware, ModelSizes
from workbench.simulate.source import TrafficSource, source_of
from workbench.simulate.traffic_settings import TrafficSettings
from workbench.speculative.config import DraftModel, NoSpeculation
from workbench.svg import Axis
from workbench.trace.recorder import Recorder

PANELS = ("ttft_s_p50", "tpot_s_p50")
RATE = "output_tokens_per_s"


class ServedWorkload(Workload):
    """Base of workloads of requests that an engine serves, or a fleet under simulated time; each kind defines its
    requests.
    """

    is_comparison: ClassVar = False

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure latencies, rates and cache use of every variant, and return one row each.

        Rows are medians over interleaved rounds, after the experiment's warm-ups, with the values `predicted`. The
        prefix index is emptied before each round."""
        if isinstance(experiment.executor, SimulatedExecutor):
            return measure_simulated_variants(experiment, on_progress)
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, len(variants) * (2 + experiment.measure.rounds))
        same = {"workload": experiment.workload, "sampling": experiment.sampling, "measure": experiment.measure}
        runners = load_runners(variants, on_progress, same)
        for name, variant in variants.items():
            on_progress(f"warm-up: {name}")
            for _ in range(variant.measure.warmup):
                _run_round(runners[name], variant, name)
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
        tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        for turn in range(experiment.measure.rounds):
            for name, variant in variants.items():
                on_progress(f"round {turn + 1}: {name}")
                recorder = Recorder()
                runners[name].set_listener(recorder.record)
                _run_round(runners[name], variant, name)
                runners[name].set_listener(None)
                found = {table: getattr(recorder, table)() for table in TABLES}
                rounds[name].append(round_metrics(**found))
                for table in TABLES:
                    tables[table] += [{"variant": name, "round": turn + 1, **row} for row in found[table]]
        rows = []
        for name, runner in runners.items():
            marks = described(experiment, name, runner.core.backends)
            prediction = {} if not predicted else {"predicted": predicted["variants"][name]}
            rows.append(marks | _median(rounds[name]) | prediction)
        return VariantResults(rows, {"rounds": experiment.measure.rounds}, tables)

    def predict(self, experiment: Experiment, on_progress: ProgressCallback) -> Predictions:
        return predict_each(experiment, on_progress, predict_serving)

    def chart(self, rows: VariantRows, title: str) -> Figure | None:
        """Draw tokens per second of each variant as a bar with its upper bound as a tick, and TTFT and TPOT against
        tokens per second.

        Rows without predictions are drawn as the usual bars or curves."""
        if not all("predicted" in row and "curve" not in row for row in rows):
            return None
        rates = [Bar(row["variant"], row[RATE], row["predicted"][RATE]) for row in rows]
        axis = Axis("output tokens per second (tick: upper bound by this machine's ceilings)", log=True)
        latencies = [found for key in PANELS for found in _against(rows, key)]
        return beside([bars(rates, axis, width=380), *latencies], title, columns=3)

    def cost(self, experiment: Experiment) -> WorkloadCost | None:
        requests = requests_of(experiment, tokenizer_of(experiment), spec_and_dtype(experiment)[0].vocab_size)
        if not requests:
            return None
        lengths = Counter((len(each.prompt_ids), each.sampling.max_tokens) for each in requests)
        times = experiment.measure.warmup + 1
        last = 0.0 if clients_of(experiment) else max(each.arrival for each in requests)
        return WorkloadCost((ServedRequests(experiment, lengths, times),), last * times)


class PromptsWorkload(ServedWorkload):
    """The given texts, all submitted at once, each `copies` times with seeds that count up from the sampling seed."""

    kind: Literal["prompts"] = "prompts"
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    copies: Count = 1

    def build_requests(self, experiment: Experiment, tokenizer: Tokenizer | None, vocab: int) -> list[Request]:
        if tokenizer is None:
            name = experiment.model.name
            raise WorkbenchError(f"workload.prompts: model {name!r} has no tokenizer; use `workload: {{kind: random}}`")
        texts, sampling = [text for text in self.prompts for _ in range(self.copies)], experiment.sampling
        return [
            make_request(text, tokenizer, sampling.model_copy(update={"seed": sampling.seed + n}), f"request-{n}")
            for n, text in enumerate(texts)
        ]


class RandomWorkload(ServedWorkload):
    """`requests` prompts of random tokens; every output has its full length."""

    kind: Literal["random"] = "random"
    requests: Count = 16
    prompt_tokens: Count = 32
    output_tokens: Count = 128
    seed: Seed = 0

    def build_requests(self, experiment: Experiment, tokenizer: Tokenizer | None, vocab: int) -> list[Request]:
        draw, sampling = random.Random(self.seed), experiment.sampling
        asked = {"max_tokens": self.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": ()}
        return [
            Request(
                f"request-{n}",
                random_token_ids(draw, vocab, self.prompt_tokens),
                sampling.model_copy(update={**asked, "seed": sampling.seed + n}),
            )
            for n in range(self.requests)
        ]

    def continued(self, count: int) -> tuple[Workload, int]:
        return self.model_copy(update={"seed": self.seed + 1, "requests": count}), 0


class TrafficWorkload(TrafficSettings, ServedWorkload):
    """Requests over time. A `trace` file replaces `lengths`; `time` and `length` scale the gaps between requests and
    the length of texts.

    `tenants` and `priorities` assign requests by weight: {a: 3, b: 1}, {0: 1, 5: 9}. All requests of a session have one
    tenant, and only requests of one tenant share cached pages. `deadlines` assigns the seconds from arrival to the last
    token in the same way. A policy sees the limit of an output's length; with `prediction_error` it also sees a
    predicted length: the true length times e^x, with x normally distributed with this standard deviation."""

    kind: Literal["traffic"] = "traffic"

    def build_requests(self, experiment: Experiment, tokenizer: Tokenizer | None, vocab: int) -> list[Request]:
        sampling = experiment.sampling
        return [
            request_from_arrival(
                arrival, f"request-{n}", vocab, sampling.model_copy(update={"seed": (sampling.seed + n) % 2**63})
            )
            for n, arrival in enumerate(arrivals_of(self))
        ]

    def continued(self, count: int) -> tuple[Workload, int] | None:
        if self.requests is None:
            return None
        return self.model_copy(update={"requests": self.requests + count}), self.requests

    def traffic(self) -> TrafficSource:
        return source_of(self)


def arrivals_of(traffic: TrafficSettings) -> list[Arrival]:
    """Return all arrivals of a finite traffic, in submission order. Arrivals of a closed loop are all at second 0."""
    source = source_of(traffic)
    coming = list(source.initial_arrivals())
    while (arrival := source.next_after_finish(0.0)) is not None:
        coming.append(replace(arrival, time=0.0))
    return coming


def _run_round(runner: Runner, variant: Experiment, title: str) -> None:
    runner.reset_prefix_cache()
    requests = requests_of(variant, runner.tokenizer, runner.model.spec.vocab_size)
    run_requests(runner, requests, title, False, clients_of(variant))


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    known = {key: [one[key] for one in rounds if one[key] is not None] for key in rounds[0]}
    return {key: median(values) if values else None for key, values in known.items()}


def predict_serving(experiment: Experiment, measured_hardware: MeasuredHardware) -> dict[str, Any]:
    """Predict latencies and rates: run the real scheduler on a simulated clock, which each step advances by its lower
    bound.

    With speculation all drafts count as accepted. Without a cache, requests run one after another."""
    sizes, dtype = sizes_of(experiment), spec_and_dtype(experiment)[1]
    hardware = measured_hardware(sizes, dtype)
    ceilings = {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth}
    if isinstance(experiment.executor, UncachedExecutor):
        return ceilings | _predict_uncached(experiment, step_cost_of(sizes), hardware)
    clock = SimulatedExecutor(hardware=hardware)
    changes = {"executor": clock, "speculate": NoSpeculation(), "variants": {}, "judge": None}
    plain = experiment.model_copy(update=changes)
    fleet = fleet_for(plain, tokenizer=tokenizer_of(plain)).run()
    found = fleet_metrics(fleet, experiment.measure.slo, 0.0)
    figures = {f"{key}_p50": found[key]["p50"] for key in ("ttft_s", "tpot_s", "e2el_s")}
    gain = _speculation_speedup_bound(experiment, sizes, hardware, measured_hardware) if figures["tpot_s_p50"] else 1.0
    if gain != 1:
        figures |= {"tpot_s_p50": figures["tpot_s_p50"] / gain, "e2el_s_p50": None}
    return ceilings | figures | {"output_tokens_per_s": gain * found["output_tokens_per_s"]}


def _predict_uncached(experiment: Experiment, cost: StepCostModel, hardware: Hardware) -> dict[str, Any]:
    requests = requests_of(experiment, tokenizer_of(experiment), spec_and_dtype(experiment)[0].vocab_size)
    ttft, tpot = [], []
    for request in requests:
        known = len(request.prompt_ids)
        steps = [
            roofline_seconds([cost([(0, length)], 1)], hardware)
            for length in range(known, known + request.sampling.max_tokens)
        ]
        ttft.append(steps[0])
        tpot += steps[1:]
    return {
        "ttft_s_p50": median(ttft), "tpot_s_p50": median(tpot) if tpot else None, "e2el_s_p50": None,
        "output_tokens_per_s": (len(ttft) + len(tpot)) / (sum(ttft) + sum(tpot)),
    }  # fmt: skip


def _speculation_speedup_bound(
    experiment: Experiment, sizes: ModelSizes, hardware: Hardware, measured_hardware: MeasuredHardware
) -> float:
    """Return the factor by which drafts would raise decode tokens per second if all were accepted, contexts ignored.
    For drafts that end where the draft model is unsure, use the best length, with the extra token computed for each
    verification."""
    speculate = experiment.speculate
    if isinstance(speculate, NoSpeculation):
        return 1.0
    rows, more = experiment.schedule.max_num_seqs, speculate.num_speculative_tokens
    target = step_cost_of(sizes)
    step, proposing = roofline_seconds([target([(0, 1)] * rows, rows)], hardware), 0.0
    stops = isinstance(speculate, DraftModel) and speculate.stops_early
    if isinstance(speculate, DraftModel) and speculate.is_target:
        layers = spec_and_dtype(experiment)[0].layers
        proposing = step * (len(layers) if speculate.layers is None else len(speculate.layers)) / len(layers)
    elif isinstance(speculate, DraftModel):
        small = experiment.model_copy(update={"model": ModelConfig(name=speculate.model, dtype=speculate.dtype)})
        each = sizes_of(small)
        proposing = roofline_seconds(
            [step_cost_of(each)([(0, 1)] * rows, rows)], measured_hardware(each, spec_and_dtype(small)[1])
        )

    def gain(drafted: int) -> float:
        check = roofline_seconds([target([(0, drafted + 1)] * rows, rows * (drafted + 1))], hardware)
        return (drafted + 1) * step / (check + min(more, drafted + 1) * proposing)

    return max(map(gain, range(more + 1) if stops else [more]))


def _against(rows: VariantRows, key: str) -> Iterator[Figure]:
    found = [
        Point(row["variant"] if kind == "measured" else "", each[RATE], each[key], kind)
        for kind in ("measured", "bound")
        for row in rows
        if (each := row if kind == "measured" else row["predicted"]).get(key)
    ]
    if found:
        yield points(
            found, Axis("output tokens a second", log=True), Axis(axis_title(key), log=True), width=380, height=280
        )
