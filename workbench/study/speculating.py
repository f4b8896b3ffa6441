"""Speculative decoding measured: tokens a second with and without it at several loads, and acceptance of drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, cast

from workbench.engine.drafting import drafts_of
from workbench.engine.drafts import Drafts
from workbench.engine.runner import Runner
from workbench.engine.speculation import NoSpeculation
from workbench.errors import WorkbenchError
from workbench.model.composition import AttentionPart
from workbench.request import Request, SamplingParameters
from workbench.stages import Counted
from workbench.study.acceptance import acceptance, speed_up, timed_steps, tokens_a_check
from workbench.study.experiment import CachePart, Experiment, ModelPart
from workbench.study.findings import Findings
from workbench.study.held_out import sample, windows
from workbench.study.quality_texts import texts_of
from workbench.study.run import runner_for
from workbench.study.speculation_workload import SpeculationWorkload
from workbench.study.variants import every_variant, settings_text
from workbench.trace.events import Finished
from workbench.trace.recorder import Recorder

Tell = Callable[[str], None]


def speculating(experiment: Experiment, tell: Tell = lambda line: None) -> Findings:
    """Measure speculation and return one row a variant.

    All variants run in turn at every load and round, so that contention affects all alike."""
    work = cast(SpeculationWorkload, experiment.workload)
    variants = every_variant(experiment)
    tell = Counted(tell, len(variants) * (2 + len(work.loads) * (work.rounds + 1)))
    runners, drafts = _loaded(variants, tell)
    asked, about = _requests(variants, runners, work)
    runs: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for turn in range(work.rounds + 1):
        for load in work.loads:
            for name, runner in runners.items():
                tell(f"{f'round {turn}' if turn else 'warm-up'}: {load} at once, {name}")
                runner.speculate(drafts[name])
                found, mine = _run(runner, asked[name], load)
                if turn:
                    marks = {"variant": name, "load": load, "round": turn}
                    runs.append({**marks, **found})
                    checks += [{**marks, **check} for check in mine]
    rows = [_row(experiment, name, variants[name], runs, checks) for name in runners]
    for row in rows:
        tell(f"how predictable the texts are: {row['variant']}")
        row |= _by_text(runners[row["variant"]], asked[row["variant"]], runs, checks, row)
    _compare(rows, variants, runs, checks)
    tables = {"runs": [{k: v for k, v in run.items() if k != "token_ids"} for run in runs], "checks": checks}
    return Findings(rows, about, tables)


def _loaded(variants: dict[str, Experiment], tell: Tell) -> tuple[dict[str, Runner], dict[str, Drafts | None]]:
    """Build a runner for each variant, and its proposer.

    Variants that differ only in speculation and sampling share a runner."""
    targets: dict[str, Runner] = {}
    models: dict[tuple[str, str, str, str], Runner] = {}
    runners: dict[str, Runner] = {}
    drafts: dict[str, Drafts | None] = {}
    for name, variant in variants.items():
        tell(f"loading: {name}")
        base = variant.model_copy(update={"speculate": NoSpeculation(), "sampling": SamplingParameters()})
        key = base.to_yaml()
        if key not in targets:
            targets[key] = runner_for(base)
        runner = runners[name] = targets[key]

        def load(model: str, dtype: str, lane: str, base: Experiment = base, key: str = key) -> Runner:
            wanted = base.model_copy(
                update={
                    "model": ModelPart(name=model, dtype=dtype, device=base.model.device),  # type: ignore[arg-type]
                    "lane": lane,
                    "attention": AttentionPart(),
                    "cache": CachePart(page_size=base.cache.page_size),
                }
            )
            if (known := (key, model, dtype, lane)) not in models:
                models[known] = runner_for(wanted)
            return models[known]

        settings = variant.speculate
        drafts[name] = (
            None
            if isinstance(settings, NoSpeculation)
            else drafts_of(settings, runner.model.spec, runner.tokenizer, base.lane, load)
        )
    return runners, drafts


def _requests(
    variants: dict[str, Experiment], runners: dict[str, Runner], work: SpeculationWorkload
) -> tuple[dict[str, list[Request]], dict[str, Any]]:
    first = next(iter(runners.values()))
    if first.tokenizer is None:
        raise WorkbenchError("workload.kind speculation: the model has no tokenizer, and the prompts are texts")
    context = work.prompt_tokens + work.output_tokens
    if context > first.model.spec.context:
        raise WorkbenchError(
            f"workload: {work.prompt_tokens} prompt tokens and {work.output_tokens} more exceed the model's context of "
            f"{first.model.spec.context}"
        )
    texts, about = texts_of(work.texts)
    cut = sample(windows(first.tokenizer, texts, context), work.prompts, work.seed, context)
    asked = {}
    for name, variant in variants.items():
        way = variant.sampling.model_copy(update={"max_tokens": work.output_tokens, "ignore_eos": True, "stop": ()})
        asked[name] = [
            Request(f"prompt-{i}", window.ids[: work.prompt_tokens], way.model_copy(update={"seed": way.seed + i}))
            for i, window in enumerate(cut)
        ]
    return asked, about | {"prompts": sorted({window.name for window in cut}), "loads": list(work.loads)}


def _run(runner: Runner, requests: Sequence[Request], load: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `requests`, `load` of them at once, and return the seconds and tokens of steps that only decode, and the
    verifications."""
    recorder = Recorder()
    runner.instruments.listener = recorder.note
    tokens: dict[str, tuple[int, ...]] = {}
    copies = [replace(requests[i % len(requests)], request_id=f"r{i}") for i in range(max(load, len(requests)))]
    for start in range(0, len(copies), load):
        for event in runner.stream(copies[start : start + load]):
            if isinstance(event, Finished):
                if event.reason != "length":
                    raise WorkbenchError(f"{event.request_id}: {event.error or event.reason}")
                tokens[event.request_id] = event.token_ids
    runner.instruments.listener = None
    timed = timed_steps(recorder.steps(), load)
    wall = math.fsum(step["wall_seconds"] for step in timed)
    given = sum(step["decode_tokens"] for step in timed)
    names = "wall_seconds", "forward_seconds", "draft_seconds"
    typical = {f"median_{name}": median(step[name] for step in timed) for name in names} if timed else {}
    return (
        {"seconds": wall, "tokens": given, "steps": len(timed), "tokens_per_s": given / wall, **typical}
        | {"checked": sum(step["drafted_tokens"] > 0 for step in timed), "token_ids": tokens},
        recorder.checks(),
    )


def _row(
    experiment: Experiment, name: str, variant: Experiment, runs: list[dict[str, Any]], checks: list[dict[str, Any]]
) -> dict[str, Any]:
    """Build one row: medians over the rounds by load, and acceptance over all verifications at the first load."""
    mine = [run for run in runs if run["variant"] == name]
    loads = list(dict.fromkeys(run["load"] for run in mine))
    spec = variant.speculate
    alone = [run for run in mine if run["load"] == loads[0]]
    told = acceptance([c for c in checks if c["variant"] == name and c["load"] == loads[0]], [])
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
        **({key: told[key] for key in TOLD} if speculates else {}),
    }


def _by_text(
    runner: Runner, requests: Sequence[Request], runs: list[dict[str, Any]], checks: list[dict[str, Any]], row: dict
) -> dict[str, Any]:
    """Return acceptance on the more predictable half of the texts and on the other half.

    Texts are ordered by the bits a token that the model assigns to its own continuation."""
    name, load = row["variant"], int(next(iter(row["tokens_per_s"])))
    mine = [check for check in checks if (check["variant"], check["load"]) == (name, load)]
    if not mine:
        return {}
    run = next(run for run in runs if (run["variant"], run["load"]) == (name, load))
    bits = {f"r{i}": _bits(runner, each, run["token_ids"][f"r{i}"]) for i, each in enumerate(requests)}
    order = sorted(bits, key=bits.__getitem__)
    halves = {"predictable": order[: len(order) // 2], "unusual": order[len(order) // 2 :]}
    return {
        "by_text": {
            half: {
                "bits_a_token": sum(bits[each] for each in texts) / len(texts),
                "chance": acceptance([check for check in mine if check["request_id"] in texts], [])["chance"],
            }
            for half, texts in halves.items()
            if texts
        }
    }


def _bits(runner: Runner, request: Request, output: tuple[int, ...]) -> float:
    ids = (*request.prompt_ids, *output)
    logprobs = runner.model.logits(ids[:-1])[len(request.prompt_ids) - 1 :].double().log_softmax(-1)
    return -float(logprobs[range(len(output)), list(output)].mean()) / math.log(2)


TOLD = (
    "checks", "draft_acceptance_rate", "mean_acceptance_length", "acceptance_by_position", "acceptance_histogram",
    "chance",
)  # fmt: skip


def _tokens_a_check(row: dict[str, Any], settings: Any, checks: list[dict[str, Any]]) -> float:
    """Return the tokens that a check gives by the chance that a token stands: of as many drafted as are asked for or,
    where the draft stops on its own, as each check had."""
    if not getattr(settings, "confidence_threshold", 0):
        return tokens_a_check(row["chance"], row["num_speculative_tokens"])
    load = int(next(iter(row["tokens_per_s"])))
    mine = [check["drafted"] for check in checks if (check["variant"], check["load"]) == (row["variant"], load)]
    return math.fsum(tokens_a_check(row["chance"], drafted) for drafted in mine) / len(mine)


def _compare(
    rows: list[dict[str, Any]],
    variants: dict[str, Experiment],
    runs: list[dict[str, Any]],
    checks: list[dict[str, Any]],
) -> None:
    """Beside each row that speculates, what it is against the one of the same temperature that does not."""
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
            given = _tokens_a_check(row, variants[row["variant"]].speculate, checks)
            row["predicted_speed_up"] = speed_up(given, row["checked_share"], row["cost"])
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
