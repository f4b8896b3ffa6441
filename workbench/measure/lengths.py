"""Prefill and decode times of one request by length, compared with the cost model's prediction, and their chart."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, cast

from compiled_kernels.rounds import interleaved
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import LengthsWorkload
from workbench.experiment.variants import VariantResults, every_variant, settings_text
from workbench.measure.chart import import_altair
from workbench.measure.predictions import Predictions
from workbench.measure.rounds import load_runners
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.trace.events import Decoded, Finished, Stepped

SECONDS = ("prefill_s", "decode_step_s", "decode_s", "e2el_s")
WIDTH, HEIGHT = 440, 280
PANELS = (("prefill_s", "prefill"), ("decode_step_s", "one decode step"))
SERIES_NAMES = ["measured", "bound by this machine's ceilings"]
Rows = Sequence[Mapping[str, Any]]


def measure_lengths(
    experiment: Experiment, on_progress: Callable[[str], None], predicted: Predictions
) -> VariantResults:
    """Measure lengths and return one row a variant.

    Its `curve` has one point a length: medians over the rounds, the prediction, and the fractions of the measured
    ceilings that the necessary FLOPs and bytes reach."""
    work = cast(LengthsWorkload, experiment.workload)
    variants = every_variant(experiment)
    on_progress = StageCounter(on_progress, len(variants) * (1 + (work.rounds + 1) * len(work.lengths)))
    runners = load_runners(variants, on_progress)
    cases = [(prompt, output, name) for prompt, output in work.lengths for name in runners]
    rounds: list[dict[str, Any]] = []
    for turn, (prompt, output, name) in interleaved(
        cases, work.rounds, on_progress, lambda case: f"{case[0]:,} in, {case[1]:,} out, {case[2]}"
    ):
        found = time_request(runners[name], prompt, output, f"{work.seed}/{turn}")
        if turn:
            lengths = {"prompt_tokens": prompt, "output_tokens": output}
            rounds.append({"variant": name, "round": turn, **lengths, **found})
    rows = []
    for name, runner in runners.items():
        prediction = predicted["variants"][name]
        row: dict[str, Any] = {
            "variant": name,
            "settings": settings_text(experiment, name),
            "backend": str(runner.core.backends),
        }
        row |= {"parameters": runner.model.spec.num_parameters, "weight_bytes": runner.model.weight_bytes}
        row |= {"predicted": prediction, "curve": []}
        for expected in prediction["lengths"]:
            mine = [r for r in rounds if r["variant"] == name and _same(r, expected)]
            row["curve"].append(_point({key: median(r[key] for r in mine) for key in SECONDS}, expected, prediction))
        rows.append(row)
    return VariantResults(rows, {"rounds": work.rounds}, {"rounds": rounds})


def time_request(runner: Runner, prompt: int, output: int, name: str) -> dict[str, float]:
    """Time one request that runs alone, with an empty prefix index.

    Returns the seconds of its prefill steps together, of its median decode step, of all decode steps, and from arrival
    to the last token."""
    runner.reset_prefix_cache()
    ids = random_token_ids(random.Random(f"{name}/{prompt}"), runner.model.spec.vocab_size, prompt)
    sampling = SamplingParameters(temperature=0.0, max_tokens=output, ignore_eos=True)
    asked = Request(f"alone-{prompt}", ids, sampling)
    steps: dict[str, list[float]] = {"prefill": [], "decode": []}
    began = ended = runner.clock()
    for event in runner.stream([asked]):
        if isinstance(event, Stepped):
            steps[event.phase].append(event.wall_seconds)
        elif isinstance(event, Decoded):
            ended = event.time
        elif isinstance(event, Finished) and event.reason != "length":
            raise WorkbenchError(f"a prompt of {prompt} tokens and {output} more: {event.error or event.reason}")
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


def chart(rows: Rows, title: str) -> Any:
    """Draw an Altair chart with logarithmic axes: prefill and one decode step against the prompt's length.

    Where all rows have a single length, it shows the request's whole time against the model's size."""
    altair = import_altair()
    if all(len(row["curve"]) == 1 for row in rows):
        return _by_size(altair, rows).properties(title=title)
    panels = [panel(altair, rows, *each) for each in PANELS]
    return altair.hconcat(*panels).properties(title=title)


def panel(altair: Any, rows: Rows, key: str, title: str) -> Any:
    """Draw the seconds `key` of every curve against what its points vary (their `path`), measured and predicted."""
    names = [row["variant"] for row in rows]
    points = [
        {"variant": row["variant"], "x": point["value"], "ms": 1e3 * point[front + key], "kind": kind}
        for row in rows
        for point in row["curve"]
        for kind, front in zip(SERIES_NAMES, ("", "predicted_"), strict=True)
    ]
    ends = min(point["x"] for point in points), max(point["x"] for point in points)
    ticks = [2**power for power in range(ends[0].bit_length() - 1, ends[1].bit_length() + 1) if 2**power <= ends[1]]
    x = altair.X(
        "x:Q", title=rows[0]["curve"][0]["path"], axis=altair.Axis(values=ticks, format="d"),
        scale=altair.Scale(type="log", base=2, domain=[0.9 * ends[0], 1.1 * ends[1]], nice=False),
    )  # fmt: skip
    times = [point["ms"] for point in points]
    y = altair.Y(
        "ms:Q", title="milliseconds", scale=altair.Scale(type="log", domain=[0.8 * min(times), 1.25 * max(times)])
    )
    colour = altair.Color("variant:N", sort=names, title=None) if len(names) > 1 else altair.value("#0b6e4f")
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y, color=colour)
    dash = altair.StrokeDash(
        "kind:N", sort=SERIES_NAMES, title=None, scale=altair.Scale(domain=SERIES_NAMES, range=[[1, 0], [5, 4]])
    )
    lines = base.mark_line(clip=True).encode(strokeDash=dash)
    dots = base.transform_filter(f"datum.kind == '{SERIES_NAMES[0]}'").mark_point(filled=True, size=40, opacity=1)
    return (lines + dots).properties(width=WIDTH, height=HEIGHT, title=title)


def _by_size(altair: Any, rows: Rows) -> Any:
    points = [
        {"variant": row["variant"], "parameters": row["parameters"], "ms": 1e3 * row["curve"][0][key], "kind": kind}
        for row in rows
        for kind, key in zip(SERIES_NAMES, ("e2el_s", "predicted_e2el_s"), strict=True)
    ]
    x = altair.X("parameters:Q", title="parameters", scale=altair.Scale(type="log"), axis=altair.Axis(format="~s"))
    y = altair.Y("ms:Q", title="milliseconds of one request", scale=altair.Scale(type="log", nice=False))
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y)
    dash = altair.StrokeDash(
        "kind:N", sort=SERIES_NAMES, title=None, scale=altair.Scale(domain=SERIES_NAMES, range=[[1, 0], [5, 4]])
    )
    seen = base.transform_filter(f"datum.kind == '{SERIES_NAMES[0]}'")
    names = seen.mark_text(align="right", dx=-6, dy=-10, fontSize=11).encode(text="variant:N")
    dots = seen.mark_point(filled=True, size=50, opacity=1)
    return (base.mark_line().encode(strokeDash=dash) + dots + names).properties(width=560, height=320)
