"""Measure prefill and decode times of one request by length, compare them with the cost model's prediction, and draw
both.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from compiled_kernels.rounds import interleaved
from workbench.engine.runner import Runner
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
from workbench.figures.figure import Figure, beside
from workbench.figures.lines import Series, lines
from workbench.figures.points import Point, points
from workbench.measure.predictions import MeasuredHardware, predict_each, prefill_steps, roofline_seconds
from workbench.measure.rounds import check_full_length, greedy_sampling, load_runners
from workbench.measure.simulated import sizes_of, step_cost_of
from workbench.memory.capacity import spec_and_dtype
from workbench.progress import StageCounter
from workbench.request import Request, random_token_ids
from workbench.settings import Count, Seed
from workbench.simulate.executor_settings import UncachedExecutor
from workbench.svg import Axis
from workbench.trace.events import Decoded, Stepped
from workbench.units import Measure, duration, share

SECONDS = ("prefill_s", "decode_step_s", "decode_s", "e2el_s")
PANELS = (("prefill_s", "prefill"), ("decode_step_s", "one decode step"))


class LengthsWorkload(Workload):
    """Run requests of random tokens, each alone on the machine, with given pairs of prompt tokens and output tokens.

    Every round runs all lengths of all variants in turn, after one warm-up round."""

    measures: ClassVar = (
        Measure("parameters"),
        duration("decode_step_s", "decode step"),
        duration("decode_s", "decode"),
        duration("e2el_s", "E2EL"),
        share("prefill_flops_share", "prefill, of FLOP/s", timed=True),
        share("decode_bytes_share", "decode, of bytes/s", timed=True),
    )
    is_predicted: ClassVar = True
    kind: Literal["lengths"] = "lengths"
    lengths: Annotated[tuple[tuple[Count, Annotated[int, Field(ge=2)]], ...], Field(min_length=1)]
    rounds: Count = 3
    seed: Seed = 0

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure lengths and return one row for each variant.

        Its `curve` has one point for each length: medians over the rounds, the prediction, and the fractions of the
        measured ceilings that the minimum FLOPs and bytes amount to."""
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, len(variants) * (1 + (self.rounds + 1) * len(self.lengths)))
        runners = load_runners(variants, on_progress)
        cases = [(prompt, output, name) for prompt, output in self.lengths for name in runners]
        rounds: list[dict[str, Any]] = []
        for turn, (prompt, output, name) in interleaved(
            cases, self.rounds, on_progress, lambda case: f"{case[0]:,} in, {case[1]:,} out, {case[2]}"
        ):
            found = time_request(runners[name], prompt, output, f"{self.seed}/{turn}")
            if turn:
                lengths = {"prompt_tokens": prompt, "output_tokens": output}
                rounds.append({"variant": name, "round": turn, **lengths, **found})
        rows = []
        for name, runner in runners.items():
            prediction = predicted["variants"][name]
            row: dict[str, Any] = {**described(experiment, name, runner.core.backends)}
            row |= {"parameters": runner.model.spec.num_parameters, "weight_bytes": runner.model.weight_bytes}
            row |= {"predicted": prediction, "curve": []}
            for expected in prediction["lengths"]:
                mine = [r for r in rounds if r["variant"] == name and _same(r, expected)]
                row["curve"].append(
                    _point({key: median(r[key] for r in mine) for key in SECONDS}, expected, prediction)
                )
            rows.append(row)
        return VariantResults(rows, {"rounds": self.rounds}, {"rounds": rounds})

    def predict(self, experiment: Experiment, on_progress: ProgressCallback) -> Predictions:
        return predict_each(experiment, on_progress, _predict)

    def chart(self, rows: VariantRows, title: str) -> Figure:
        """Draw the seconds of a prefill and of one decode step against the prompt's length, with logarithmic axes.

        If all rows have a single length, draw the request's whole time against the model's size instead."""
        if all(len(row["curve"]) == 1 for row in rows):
            return _by_size(rows, title)
        return beside([_panel(rows, *each) for each in PANELS], title)

    def cost(self, experiment: Experiment) -> WorkloadCost:
        return WorkloadCost((ServedRequests(experiment, Counter(self.lengths), self.rounds + 1),))


def _predict(experiment: Experiment, measured_hardware: MeasuredHardware) -> dict[str, Any]:
    """Predict each length's prefill, and the decode step in the middle of its output."""
    sizes, dtype = sizes_of(experiment), spec_and_dtype(experiment)[1]
    hardware, cost = measured_hardware(sizes, dtype), step_cost_of(sizes)
    uncached = isinstance(experiment.executor, UncachedExecutor)
    found = []
    for prompt, output in cast(LengthsWorkload, experiment.workload).lengths:
        most = prompt if uncached else experiment.schedule.max_num_batched_tokens
        prefill = prefill_steps(cost, prompt, most)
        known = prompt + output // 2
        decode = cost([(0, known)], 1) if uncached else cost([(known - 1, 1)], 1)
        times = {
            "prefill_s": roofline_seconds(prefill, hardware),
            "decode_step_s": roofline_seconds([decode], hardware),
        }
        times["decode_s"] = (output - 1) * times["decode_step_s"]
        found.append({
            "prompt_tokens": prompt, "output_tokens": output, **times,
            "e2el_s": times["prefill_s"] + times["decode_s"],
            "prefill_flops": sum(each.flops for each in prefill), "prefill_bytes": sum(each.bytes for each in prefill),
            "decode_flops": decode.flops, "decode_bytes": decode.bytes,
        })  # fmt: skip
    return {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth, "lengths": found}


def time_request(runner: Runner, prompt: int, output: int, name: str) -> dict[str, float]:
    """Time one request that runs alone, with an empty prefix index.

    Returns the total seconds of its prefill steps, the seconds of its median decode step, the total of all decode
    steps, and the seconds from arrival to the last token."""
    runner.reset_prefix_cache()
    ids = random_token_ids(random.Random(f"{name}/{prompt}"), runner.model.spec.vocab_size, prompt)
    sampling = greedy_sampling(output)
    asked = Request(f"alone-{prompt}", ids, sampling)
    steps: dict[str, list[float]] = {"prefill": [], "decode": []}
    began = ended = runner.clock()
    for event in runner.stream([asked]):
        if isinstance(event, Stepped):
            steps[event.phase].append(event.wall_seconds)
        elif isinstance(event, Decoded):
            ended = event.time
        check_full_length(event, f"a prompt of {prompt} tokens and {output} output tokens")
    return {
        "prefill_s": sum(steps["prefill"]),
        "decode_step_s": median(steps["decode"]),
        "decode_s": sum(steps["decode"]),
        "e2el_s": ended - began,
    }


def _point(found: dict[str, float], prediction: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    ceilings = variant["flops_per_s"], variant["bytes_per_s"]
    shares = {}
    for phase, seconds in (("prefill", found["prefill_s"]), ("decode", found["decode_step_s"])):
        for what, ceiling in zip(("flops", "bytes"), ceilings, strict=True):
            shares[f"{phase}_{what}_share"] = prediction[f"{phase}_{what}"] / seconds / ceiling
    predicted = {f"predicted_{key}": prediction[key] for key in SECONDS}
    lengths = {key: prediction[key] for key in ("prompt_tokens", "output_tokens")}
    return {"path": "prompt tokens", "value": prediction["prompt_tokens"], **lengths, **found, **predicted, **shares}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("prompt_tokens", "output_tokens"))


def _by_size(rows: VariantRows, title: str) -> Figure:
    found = [
        Point(row["variant"] if kind == "measured" else "", row["parameters"], 1e3 * row["curve"][0][key], kind)
        for kind, key in (("measured", "e2el_s"), ("lower bound by this machine's ceilings", "predicted_e2el_s"))
        for row in rows
    ]
    x, y = Axis("parameters", log=True), Axis("milliseconds for one request", log=True)
    return points(found, x, y, title, width=560, height=320)


def _panel(rows: VariantRows, key: str, title: str) -> Figure:
    """Draw the measured and predicted seconds `key` of every curve against the value that varies between its points
    (its `path`).
    """
    series = [
        Series(
            row["variant"],
            tuple((point["value"], 1e3 * point[front + key]) for point in row["curve"]),
            marked=not front,
            dashed=bool(front),
        )
        for row in rows
        for front in ("", "predicted_")
    ]
    x, y = Axis(rows[0]["curve"][0]["path"], log=True), Axis("milliseconds", log=True)
    return lines(series, x, y, title, width=440, height=280)
