"""Determinism of a greedy answer: repeat one prompt in varying batch compositions and count different outputs, bit for
bit.

The cost of `batch_invariant` comes from steps of all variants timed in turn: ratios of variants that differ by it
alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, cast

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import DeterminismWorkload, OverheadSettings
from workbench.experiment.variants import Rows, VariantResults, described, every_variant
from workbench.measure.chart import import_altair
from workbench.measure.rounds import load_runners, measure_in_rounds
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.trace.events import Decoded, Finished, Stepped

Costs = dict[str, dict[str, float]]
TIMED_PHASES = ("prefill", "decode_one", "decode_many")
ProgressCallback = Callable[[str], None]
REPEATED_REQUEST = "repeated"  # id of the repeated request; the others' ids end in numbers
GOOD, BAD = "#0b6e4f", "#b3541e"
EXPENSIVE_RATIO = 2.0  # times as long
COUNTS = {"varying_outputs": "outputs", "varying_bits": "sets of bits"}
PRICES = {"price_prefill": "prefill", "price_decode_one": "decode of one", "price_decode_many": "decode of many"}


def measure_overhead(
    settings: OverheadSettings, variants: Mapping[str, Experiment], seed: int, on_progress: Callable[[str], None]
) -> tuple[Costs, Rows]:
    """Time every variant in interleaved rounds after one warm-up round.

    Returns:
        By variant the seconds of a step (median of the rounds) and `price_...`: the median over rounds of the ratio to
        the variant without the mode. Second, the rounds themselves.
    """
    runners = load_runners({name: _of_model(variant, settings) for name, variant in variants.items()}, on_progress)
    times = measure_in_rounds(
        runners, settings.rounds, on_progress, lambda name, turn: time_round(settings, runners[name], f"{seed}/{turn}")
    )
    costs: Costs = {}
    for name in variants:
        mine = _rounds(times, name)
        costs[name] = {f"{what}_s": median(each[what] for each in mine) for what in TIMED_PHASES}
        if (plain := _variant_without_mode(name, variants)) is not None:
            pairs = list(zip(mine, _rounds(times, plain), strict=True))
            costs[name] |= {f"price_{what}": median(on[what] / off[what] for on, off in pairs) for what in TIMED_PHASES}
    return costs, times


def time_round(settings: OverheadSettings, runner: Runner, name: str) -> dict[str, float]:
    """Return the seconds of one prefill, of a decode step of one sequence, and of one of `batch` sequences."""
    runner.reset_prefix_cache()
    return {
        "prefill": _steps(runner, name, 1, settings.prefill_tokens, 1, "prefill", total=True),
        "decode_one": _steps(runner, name, 1, settings.context, settings.tokens, "decode"),
        "decode_many": _steps(runner, name, settings.batch, settings.context, settings.tokens, "decode"),
    }


def _steps(runner: Runner, name: str, count: int, prompt: int, tokens: int, phase: str, total: bool = False) -> float:
    """Return the seconds of all steps of a phase together, or the median step of those that decode every sequence."""
    draw, vocab = random.Random(name), runner.model.spec.vocab_size
    sampling = SamplingParameters(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    ids = [random_token_ids(draw, vocab, prompt) for _ in range(count)]
    requests = [Request(f"timed-{index}", each, sampling) for index, each in enumerate(ids)]
    steps = [event for event in runner.stream(requests) if isinstance(event, Stepped) and event.phase == phase]
    if total:
        return sum(step.wall_seconds for step in steps)
    together = [step.wall_seconds for step in steps if step.decode_tokens == count]
    if not together:
        raise WorkbenchError(
            f"workload.price: {count} sequences never decode together; lower price.batch, or raise price.tokens, "
            "schedule.max_num_seqs or cache.pages"
        )
    return median(together)


def _rounds(times: Rows, name: str) -> Rows:
    return [each for each in times if each["variant"] == name]


def _of_model(variant: Experiment, price: OverheadSettings) -> Experiment:
    if price.model is None:
        return variant
    return variant.model_copy(update={"model": variant.model.model_copy(update={"name": price.model})})


def _variant_without_mode(name: str, variants: Mapping[str, Experiment]) -> str | None:
    """Return the name of the variant that differs from this one by `batch_invariant` alone; None if there is none."""
    mine = variants[name]
    if not mine.batch_invariant:
        return None
    plain = mine.model_copy(update={"batch_invariant": False})
    return next((other for other, variant in variants.items() if variant == plain), None)


def measure_determinism(experiment: Experiment, on_progress: ProgressCallback = lambda line: None) -> VariantResults:
    """Measure determinism of every variant.

    Returns one row a variant: distinct outputs in varying and in the same batch compositions. Where another variant
    differs only by `batch_invariant`, the row also has the cost of that mode."""
    work, variants = cast(DeterminismWorkload, experiment.workload), every_variant(experiment)
    prompts = work.prompts if isinstance(work.prompts, int) else len(work.prompts)
    timed = 0 if work.price is None else 2 + work.price.rounds
    on_progress = StageCounter(on_progress, len(variants) * (1 + prompts + timed))
    rows, asked = [], []
    for name, variant in variants.items():
        on_progress(f"loading: {name}")
        runner = runner_for(variant)
        found: list[dict[str, Any]] = []
        for index, prompt in enumerate(_prompts(work, runner)):
            on_progress(f"{name}: prompt {index + 1}")
            turns = [("varying", turn) for turn in range(work.runs)] + [("same", 0)] * work.repeats
            for kind, turn in turns:
                others = _batch_composition(work, f"{work.seed}/{index}/{turn}", runner.model.spec.vocab_size)
                found.append(
                    {"prompt": index, "batch_composition": kind, **generate_in_batch(work, runner, prompt, others)}
                )
        asked += [{"variant": name, **each} for each in found]
        rows.append({
            **described(experiment, name, runner.core.backends),
            "dtype": str(runner.model.dtype).removeprefix("torch."), "batch_invariant": variant.batch_invariant,
            **{f"{kind}_{what}": num_distinct_outputs(found, kind, key)
               for kind in ("varying", "same") for what, key in (("outputs", "token_ids"), ("bits", "logprobs"))},
            "diverged_prompts": sum(count > 1 for count in _distinct_by_prompt(found, "varying", "token_ids")),
        })  # fmt: skip
    tables = {"outputs": asked}
    if work.price is not None:
        costs, tables["times"] = measure_overhead(work.price, variants, work.seed, on_progress)
        for row in rows:
            row |= costs[row["variant"]]
    about = {
        "prompts": len(_distinct_by_prompt(asked, "same", "token_ids")),
        "runs": work.runs,
        "output_tokens": work.output_tokens,
    }
    return VariantResults(rows, about, tables)


def num_distinct_outputs(runs: Sequence[dict[str, Any]], kind: str, key: str) -> int:
    """Return the number of different outputs of one prompt under batch compositions of a kind: that of the prompt with
    most."""
    return max(_distinct_by_prompt(runs, kind, key))


def _distinct_by_prompt(found: Sequence[dict[str, Any]], kind: str, key: str) -> list[int]:
    answers: dict[int, set] = {}
    for each in found:
        if each["batch_composition"] == kind:
            answers.setdefault(each["prompt"], set()).add(tuple(each[key]))
    return [len(each) for each in answers.values()]


def generate_in_batch(
    workload: DeterminismWorkload, runner: Runner, prompt: tuple[int, ...], batch_composition: tuple[int, list[Request]]
) -> dict[str, Any]:
    """Return the greedy tokens of a prompt and their log-probabilities, while the other requests of `batch_composition`
    run."""
    place, requests = batch_composition
    sampling = SamplingParameters(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True, logprobs=0)
    requests.insert(place, Request(REPEATED_REQUEST, prompt, sampling))
    tokens: list[int] = []
    logprobs: list[float] = []
    for event in runner.stream(requests):
        if isinstance(event, Decoded) and event.request_id == REPEATED_REQUEST:
            tokens.append(event.token_id)
            logprobs.append(cast(float, event.logprob))
        if isinstance(event, Finished) and event.reason != "length":
            raise WorkbenchError(f"{event.request_id}: {event.error or event.reason}")
    return {"token_ids": tokens, "logprobs": logprobs, "others": len(requests) - 1}


def _prompts(workload: DeterminismWorkload, runner: Runner) -> list[tuple[int, ...]]:
    if isinstance(workload.prompts, int):
        draw, vocab = random.Random(workload.seed), runner.model.spec.vocab_size
        return [random_token_ids(draw, vocab, workload.prompt_tokens) for _ in range(workload.prompts)]
    if runner.tokenizer is None:
        name = runner.model.spec.name
        raise WorkbenchError(f"workload.prompts: model {name!r} has no tokenizer; say how many prompts, as a number")
    return [(*runner.tokenizer.bos_token_ids, *runner.tokenizer.encode(text)) for text in workload.prompts]


def _batch_composition(workload: DeterminismWorkload, name: str, vocab: int) -> tuple[int, list[Request]]:
    """Draw other requests of random tokens, and the number of them that precede the prompt."""
    draw = random.Random(name)
    others = []
    for index in range(draw.randint(0, workload.other_requests)):
        ids = random_token_ids(draw, vocab, draw.randint(1, workload.other_request_tokens))
        most = draw.randint(1, workload.other_request_tokens)
        sampling = SamplingParameters(temperature=0.0, max_tokens=most, ignore_eos=True)
        others.append(Request(f"other-{index}", ids, sampling))
    return draw.randint(0, len(others)), others


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw an Altair chart: bars of distinct outputs by variant, and beside them the costs as ratios."""
    altair = import_altair()
    counts = _values(rows, COUNTS)
    left = _bars(altair, counts, "different answers to one prompt", "datum.value > 1", "d", tick=1)
    ratios = _values(rows, PRICES)
    if not ratios:
        return left.properties(title=title)
    right = _bars(altair, ratios, "time with the mode / without", f"datum.value > {EXPENSIVE_RATIO}", ".2f", tick=0.5)
    return altair.hconcat(left, right).properties(title=title)


def _values(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"label": f"{row['variant']}: {label}", "value": row[name]}
        for row in rows
        for name, label in names.items()
        if name in row
    ]


def _bars(altair: Any, values: list[dict[str, Any]], axis: str, bad: str, format: str, tick: float) -> Any:
    most = max(each["value"] for each in values)
    base = altair.Chart(altair.Data(values=values)).encode(
        y=altair.Y("label:N", title=None, sort=[each["label"] for each in values], axis=altair.Axis(labelLimit=300)),
        x=altair.X(
            "value:Q", title=axis, axis=altair.Axis(tickMinStep=tick), scale=altair.Scale(domain=[0, 1.15 * most])
        ),
    )
    bars = base.mark_bar().encode(color=altair.condition(bad, altair.value(BAD), altair.value(GOOD)))
    numbers = base.mark_text(align="left", dx=4, fontSize=11).encode(text=altair.Text("value:Q", format=format))
    return (bars + numbers).properties(width=260, height=altair.Step(22))
