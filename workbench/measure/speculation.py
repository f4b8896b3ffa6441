"""Measure speculative decoding: tokens per second with and without it at several loads, and acceptance of drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from compiled_kernels.rounds import interleaved
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.engine.speculator import build_speculator
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, VariantResults
from workbench.experiment.variants import every_variant, settings_text
from workbench.experiment.verdict import VariantRows
from workbench.figures.bars import Column, columns
from workbench.figures.figure import Figure, beside
from workbench.figures.lines import Series, lines
from workbench.measure.quality.held_out import HeldOutWorkload
from workbench.measure.rounds import check_full_length
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters
from workbench.runs.metrics import (
    acceptance_metrics,
    expected_speedup,
    expected_tokens_per_verification,
    steady_decode_steps,
)
from workbench.settings import Count
from workbench.speculative.config import CustomProposer, DraftModel, NoSpeculation, PromptLookup
from workbench.speculative.proposers import Speculator
from workbench.svg import Axis
from workbench.trace.events import Finished
from workbench.trace.recorder import Recorder
from workbench.units import Measure, duration, rate, ratio, share

ACCEPTANCE_METRICS = (
    "verifications", "draft_acceptance_rate", "mean_acceptance_length", "acceptance_by_position",
    "acceptance_histogram", "chance",
)  # fmt: skip
BuildSpeculator = Callable[[], Speculator | None]


class SpeculationWorkload(HeldOutWorkload):
    """Continue prompts of held-out code at several loads (sequences at once), all variants in turn.

    The first variant is the baseline of the others. All outputs have the same length: no end token stops them."""

    measures: ClassVar = (
        Measure("num_speculative_tokens", "drafted tokens", "tokens"),
        share("draft_acceptance_rate", "acceptance rate"),
        Measure("mean_acceptance_length", "tokens a verification", "tokens", "max"),
        Measure("verifications"),
        share("chance", "acceptance chance"),
        share("by_text_*_chance", "acceptance chance, {} texts"),
        Measure("by_text_*_bits_a_token", "bits a token, {} texts", "bits/token"),
        duration("step_ms", "step", "ms"),
        duration("draft_ms", "drafting", "ms"),
        duration("forward_ms", "forward pass", "ms"),
        share("checked_share", "verifying steps", None),
        ratio("cost", "step, ratio"),
        ratio("speed_up", "speed-up", "max"),
        ratio("speed_up_*", "speed-up at {}", "max"),
        ratio("speed_up_alone", "speed-up alone", "max"),
        Measure("loses_from", "loses from load"),
        share("same_tokens_share", "same outputs"),
        rate("tokens_per_s_*", "output at {}", "tokens"),
    )
    kind: Literal["speculation"] = "speculation"
    prompt_tokens: Count = 384
    output_tokens: Count = 96
    loads: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8, 16)
    rounds: Count = 3

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure speculation and return one row for each variant.

        All variants run in turn at every load and round, so that contention affects all alike."""
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, len(variants) * (2 + len(self.loads) * (self.rounds + 1)))
        runners, drafts = _build_runners(variants, on_progress)
        asked, about = _requests(variants, runners, self)
        runs: list[dict[str, Any]] = []
        verified: list[dict[str, Any]] = []
        cases = [(load, name) for load in self.loads for name in runners]
        for turn, (load, name) in interleaved(
            cases, self.rounds, on_progress, lambda case: f"{case[0]} at once, {case[1]}"
        ):
            runners[name].core.set_speculator(drafts[name]())
            found, mine = _run(runners[name], asked[name], load)
            if turn:
                marks = {"variant": name, "load": load, "round": turn}
                runs.append({**marks, **found})
                verified += [{**marks, **check} for check in mine]
        rows = [_row(experiment, name, variants[name], runs, verified) for name in runners]
        for row in rows:
            on_progress(f"measuring how predictable the texts are: {row['variant']}")
            row |= _acceptance_by_text(runners[row["variant"]], asked[row["variant"]], runs, verified, row)
        _add_speedups(rows, variants, runs, verified)
        tables = {
            "runs": [{k: v for k, v in run.items() if k != "token_ids"} for run in runs],
            "verifications": verified,
        }
        return VariantResults(rows, about, tables)

    def chart(self, rows: VariantRows, title: str) -> Figure | None:
        """Draw speed-ups by load, and the number of accepted tokens per verification; None if nothing was drafted.

        Left: the ratio of tokens per second to those without drafts at the same load, one line for each variant, and
        the prediction for the first load as a point. Right: the fraction of verifications that accept 0, 1, 2, ...
        tokens."""
        drafting = [row for row in rows if row.get("speed_up")]
        if not drafting:
            return None
        measured = [
            Series(row["variant"], tuple((float(load), times) for load, times in row["speed_up"].items()))
            for row in drafting
        ]
        first = min(load for each in measured for load, _ in each.points)
        predicted = [
            Series(row["variant"], ((first, row["predicted_speed_up"]),), dashed=True)
            for row in drafting
            if "predicted_speed_up" in row
        ]
        words = "speed-up (faint: predicted for the first load)" if predicted else "speed-up"
        left = lines(
            [*measured, *predicted],
            Axis("sequences at once", log=True),
            Axis("tokens per second, relative to those without drafts"),
            words,
            even=1.0,
            zero=True,
        )
        counts = [
            Column(str(accepted), count / sum(row["acceptance_histogram"]), row["variant"])
            for row in drafting
            for accepted, count in enumerate(row["acceptance_histogram"])
        ]
        share = Axis("fraction of verifications", percent=True)
        return beside([left, columns(counts, "accepted draft tokens", share, "acceptance")], title)


def _build_runners(
    variants: dict[str, Experiment], on_progress: ProgressCallback
) -> tuple[dict[str, Runner], dict[str, BuildSpeculator]]:
    """Build a runner for each variant, and a function that builds its speculator.

    Variants that differ only in speculation and sampling share a runner. A user-defined proposer is built anew for each
    run: one that learns from texts must not have seen the same texts in an earlier run."""
    targets: dict[str, Runner] = {}
    models: dict[tuple[str, str], Runner] = {}
    runners: dict[str, Runner] = {}
    drafts: dict[str, BuildSpeculator] = {}
    for name, variant in variants.items():
        on_progress(f"loading: {name}")
        base = variant.model_copy(update={"speculate": NoSpeculation(), "sampling": SamplingParameters()})
        key = base.to_yaml()
        if key not in targets:
            targets[key] = runner_for(base)
        runner = runners[name] = targets[key]

        def load(draft: EngineConfig, shared: LoadedModel | None = None, key: str = key) -> Runner:
            if shared is not None:  # the proposer uses layers of the target model
                return Runner(draft, shared)
            if (known := (key, draft.model_dump_json())) not in models:
                models[known] = Runner(draft)
            return models[known]

        build = partial(build_speculator, variant, runner.loaded_model, load)
        first = build()  # find a mistake in its settings before anything runs
        drafts[name] = build if isinstance(variant.speculate, CustomProposer) else partial(_same, first)
    return runners, drafts


def _same(speculator: Speculator | None) -> Speculator | None:
    return speculator


def _requests(
    variants: dict[str, Experiment], runners: dict[str, Runner], workload: SpeculationWorkload
) -> tuple[dict[str, list[Request]], dict[str, Any]]:
    first = next(iter(runners.values()))
    context = workload.prompt_tokens + workload.output_tokens
    if context > first.model.spec.max_position_embeddings:
        raise WorkbenchError(
            f"workload: {workload.prompt_tokens} prompt and {workload.output_tokens} output tokens exceed the model's "
            f"context of {first.model.spec.max_position_embeddings}"
        )
    cut, about = workload.draw_windows(first, workload.output_tokens)
    asked = {}
    for name, variant in variants.items():
        way = variant.sampling.model_copy(update={"max_tokens": workload.output_tokens, "ignore_eos": True, "stop": ()})
        asked[name] = [
            Request(f"prompt-{i}", window.ids[: workload.prompt_tokens], way.model_copy(update={"seed": way.seed + i}))
            for i, window in enumerate(cut)
        ]
    return asked, about | {"prompts": sorted({window.name for window in cut}), "loads": list(workload.loads)}


def _run(runner: Runner, requests: Sequence[Request], load: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `requests`, `load` of them at once. Return the seconds and tokens of steps that only decode, and the
    verifications."""
    recorder = Recorder()
    runner.set_listener(recorder.record)
    tokens: dict[str, tuple[int, ...]] = {}
    copies = [replace(requests[i % len(requests)], request_id=f"r{i}") for i in range(max(load, len(requests)))]
    for start in range(0, len(copies), load):
        for event in runner.stream(copies[start : start + load]):
            if isinstance(event, Finished):
                check_full_length(event)
                tokens[event.request_id] = event.token_ids
    runner.set_listener(None)
    timed = steady_decode_steps(recorder.steps(), load)
    if not timed:
        raise WorkbenchError(
            f"workload.loads: {load} sequences never decode in two steps in a row; lower the load, or raise "
            "schedule.max_num_seqs, cache.pages or workload.output_tokens"
        )
    wall = math.fsum(step["wall_seconds"] for step in timed)
    given = sum(step["decode_tokens"] for step in timed)
    names = "wall_seconds", "forward_seconds", "draft_seconds"
    typical = {f"median_{name}": median(step[name] for step in timed) for name in names}
    return (
        {"seconds": wall, "tokens": given, "steps": len(timed), "tokens_per_s": given / wall, **typical}
        | {"checked": sum(step["drafted_tokens"] > 0 for step in timed), "token_ids": tokens},
        recorder.verifications(),
    )


def _row(
    experiment: Experiment, name: str, variant: Experiment, runs: list[dict[str, Any]], verified: list[dict[str, Any]]
) -> dict[str, Any]:
    """Build one row: medians over the rounds by load, and acceptance over all verifications at the first load."""
    mine = [run for run in runs if run["variant"] == name]
    loads = list(dict.fromkeys(run["load"] for run in mine))
    spec = variant.speculate
    alone = [run for run in mine if run["load"] == loads[0]]
    acceptance = acceptance_metrics([c for c in verified if c["variant"] == name and c["load"] == loads[0]], [])
    speculates = not isinstance(spec, NoSpeculation)
    return {
        "variant": name,
        "settings": settings_text(experiment, name),
        "temperature": variant.sampling.temperature,
        "num_speculative_tokens": spec.num_speculative_tokens if speculates else 0,
        "tokens_per_s": {
            str(load): median(run["tokens_per_s"] for run in mine if run["load"] == load) for load in loads
        },
        "step_ms": 1e3 * median(run["median_wall_seconds"] for run in alone),
        "draft_ms": 1e3 * median(run["median_draft_seconds"] for run in alone),
        "forward_ms": 1e3 * median(run["median_forward_seconds"] for run in alone),
        "checked_share": sum(run["checked"] for run in alone) / sum(run["steps"] for run in alone),
        **({key: acceptance[key] for key in ACCEPTANCE_METRICS} if speculates else {}),
    }


def _acceptance_by_text(
    runner: Runner, requests: Sequence[Request], runs: list[dict[str, Any]], verified: list[dict[str, Any]], row: dict
) -> dict[str, Any]:
    """Return acceptance on the more predictable half of the texts and on the other half.

    Texts are ordered by the bits a token that the model assigns to its own continuation."""
    name, load = row["variant"], int(next(iter(row["tokens_per_s"])))
    mine = [check for check in verified if (check["variant"], check["load"]) == (name, load)]
    if not mine:
        return {}
    run = next(run for run in runs if (run["variant"], run["load"]) == (name, load))
    bits = {f"r{i}": _bits_per_token(runner, each, run["token_ids"][f"r{i}"]) for i, each in enumerate(requests)}
    order = sorted(bits, key=bits.__getitem__)
    halves = {"predictable": order[: len(order) // 2], "unusual": order[len(order) // 2 :]}
    return {
        "by_text": {
            half: {
                "bits_a_token": sum(bits[each] for each in texts) / len(texts),
                "chance": acceptance_metrics([check for check in mine if check["request_id"] in texts], [])["chance"],
            }
            for half, texts in halves.items()
            if texts
        }
    }


def _bits_per_token(runner: Runner, request: Request, output: tuple[int, ...]) -> float:
    ids = (*request.prompt_ids, *output)
    logprobs = runner.model.logits(ids[:-1])[len(request.prompt_ids) - 1 :].double().log_softmax(-1)
    return -float(logprobs[range(len(output)), list(output)].mean()) / math.log(2)


def _tokens_per_verification(row: dict[str, Any], settings: Any, verified: list[dict[str, Any]]) -> float:
    """Return the expected tokens of a verification, from the probability that a draft token is accepted. The number of
    draft tokens is the setting or, for drafts that end early, the recorded number of each verification."""
    if isinstance(settings, PromptLookup) or isinstance(settings, DraftModel) and not settings.stops_early:
        return expected_tokens_per_verification(row["chance"], row["num_speculative_tokens"])
    load = int(next(iter(row["tokens_per_s"])))
    mine = [check["drafted"] for check in verified if (check["variant"], check["load"]) == (row["variant"], load)]
    return math.fsum(expected_tokens_per_verification(row["chance"], drafted) for drafted in mine) / len(mine)


def _add_speedups(
    rows: list[dict[str, Any]],
    variants: dict[str, Experiment],
    runs: list[dict[str, Any]],
    verified: list[dict[str, Any]],
) -> None:
    """Add to each row with speculation its speed-up over the row without speculation at the same temperature."""
    for row in rows:
        plain = next(
            (r for r in rows if not r["num_speculative_tokens"] and r["temperature"] == row["temperature"]), None
        )
        if plain is None or not row["num_speculative_tokens"]:
            continue
        row["speed_up"] = {load: value / plain["tokens_per_s"][load] for load, value in row["tokens_per_s"].items()}
        first = next(iter(row["speed_up"]))
        row["speed_up_alone"] = row["speed_up"][first]
        row["cost"] = row["step_ms"] / plain["step_ms"]
        if row["chance"] is not None:
            given = _tokens_per_verification(row, variants[row["variant"]].speculate, verified)
            row["predicted_speed_up"] = expected_speedup(given, row["checked_share"], row["cost"])
        row["loses_from"] = next((int(load) for load, times in row["speed_up"].items() if times < 1), None)
        outputs = [
            {(run["load"], run["round"]): run["token_ids"] for run in runs if run["variant"] == each["variant"]}
            for each in (row, plain)
        ]
        same = [
            sum(outputs[0][key][name] == ids for name, ids in outputs[1][key].items()) / len(outputs[1][key])
            for key in outputs[1]
        ]
        row["same_tokens_share"] = sum(same) / len(same)
