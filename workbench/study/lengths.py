"""Prefill and decode times of one request by length, compared with the cost model's prediction."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, cast

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.stages import StageCounter
from workbench.study.experiment import Experiment
from workbench.study.findings import VariantResults
from workbench.study.lengths_workload import LengthsWorkload
from workbench.study.predicted import Predictions
from workbench.study.runner_for import runner_for
from workbench.study.variants import every_variant, settings_text
from workbench.trace.events import Decoded, Finished, Stepped

SECONDS = ("prefill_s", "decode_step_s", "decode_s", "e2el_s")


def measure_lengths(experiment: Experiment, on_progress: Callable[[str], None], predicted: Predictions) -> VariantResults:
    """Measure lengths and return one row a variant.

    Its `curve` has one point a length: medians over the rounds, the prediction, and the fractions of the measured
    ceilings that the necessary FLOPs and bytes reach."""
    work = cast(LengthsWorkload, experiment.workload)
    variants = every_variant(experiment) or {"as given": experiment}
    on_progress = StageCounter(on_progress, len(variants) * (1 + (work.rounds + 1) * len(work.lengths)))
    runners: dict[str, Runner] = {}
    for name, variant in variants.items():
        on_progress(f"loading: {name}")
        runners[name] = runner_for(variant)
    rounds: list[dict[str, Any]] = []
    for turn in range(work.rounds + 1):
        for prompt, output in work.lengths:
            for name, runner in runners.items():
                on_progress(f"{f'round {turn}' if turn else 'warm-up'}: {prompt:,} in, {output:,} out, {name}")
                found = time_request(runner, prompt, output, f"{work.seed}/{turn}")
                if turn:
                    rounds.append({"variant": name, "round": turn, "prompt_tokens": prompt, "output_tokens": output}
                                  | found)  # fmt: skip
    rows = []
    for name, runner in runners.items():
        told = predicted["variants"][name]
        row: dict[str, Any] = {"variant": name, "settings": settings_text(experiment, name), "backend": str(runner.backends)}
        row |= {"parameters": runner.model.spec.num_parameters, "weight_bytes": runner.model.weight_bytes}
        row |= {"predicted": told, "curve": []}
        for foretold in told["lengths"]:
            mine = [r for r in rounds if r["variant"] == name and _same(r, foretold)]
            row["curve"].append(_point({key: median(r[key] for r in mine) for key in SECONDS}, foretold, told))
        rows.append(row)
    return VariantResults(rows, {"rounds": work.rounds}, {"rounds": rounds})


def time_request(runner: Runner, prompt: int, output: int, name: str) -> dict[str, float]:
    """Time one request that runs alone, with an empty prefix index.

    Returns the seconds of its prefill steps together, of its median decode step, of all decode steps, and from arrival
    to the last token."""
    runner.reset_prefix_cache()
    draw, vocab = random.Random(f"{name}/{prompt}"), runner.model.spec.vocab_size
    sampling = SamplingParameters(temperature=0.0, max_tokens=output, ignore_eos=True)
    asked = Request(f"alone-{prompt}", tuple(draw.randrange(vocab) for _ in range(prompt)), sampling)
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


def _point(found: dict[str, float], prediction: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    ceilings = told["flops_per_s"], told["bytes_per_s"]
    shares = {}
    for phase, seconds in (("prefill", found["prefill_s"]), ("decode", found["decode_step_s"])):
        for what, ceiling in zip(("flops", "bytes"), ceilings, strict=True):
            shares[f"{phase}_{what}_share"] = prediction[f"{phase}_{what}"] / seconds / ceiling
    predicted = {f"predicted_{key}": prediction[key] for key in SECONDS}
    lengths = {key: prediction[key] for key in ("prompt_tokens", "output_tokens")}
    return {"path": "prompt tokens", "value": prediction["prompt_tokens"], **lengths, **found, **predicted, **shares}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("prompt_tokens", "output_tokens"))
