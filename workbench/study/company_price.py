"""Cost of `batch_invariant`: steps of all variants timed in turn, and ratios of variants that differ by it alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import median

from workbench.engine.runner import Runner
from workbench.request import Request, SamplingParameters
from workbench.study.company_workload import OverheadSettings
from workbench.study.experiment import Experiment
from workbench.study.findings import Rows
from workbench.study.runner_for import runner_for
from workbench.trace.events import Stepped

Costs = dict[str, dict[str, float]]


def measure_overhead(
    settings: OverheadSettings, variants: Mapping[str, Experiment], seed: int, on_progress: Callable[[str], None]
) -> tuple[Costs, Rows]:
    """Time every variant in interleaved rounds after one warm-up round.

    Returns:
        By variant the seconds of a step (median of the rounds) and `price_...`: the median over rounds of the ratio to
        the variant without the mode. Second, the rounds themselves.
    """
    runners: dict[str, Runner] = {}
    for name, variant in variants.items():
        on_progress(f"loading to be timed: {name}")
        runners[name] = runner_for(_of_model(variant, settings))
    times: Rows = []
    for turn in range(settings.rounds + 1):
        for name, runner in runners.items():
            on_progress(f"timed, round {turn}: {name}" if turn else f"warm-up: {name}")
            found = time_round(settings, runner, f"{seed}/{turn}")
            if turn:
                times.append({"variant": name, "round": turn, **found})
    costs: Costs = {}
    for name in variants:
        mine = _rounds(times, name)
        costs[name] = {f"{what}_s": median(each[what] for each in mine) for what in TIMED_PHASES}
        if (plain := _variant_without_mode(name, variants)) is not None:
            pairs = list(zip(mine, _rounds(times, plain), strict=True))
            costs[name] |= {f"price_{what}": median(on[what] / off[what] for on, off in pairs) for what in TIMED_PHASES}
    return costs, times


TIMED_PHASES = ("prefill", "decode_one", "decode_many")


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
    ids = [tuple(draw.randrange(vocab) for _ in range(prompt)) for _ in range(count)]
    requests = [Request(f"timed-{index}", each, sampling) for index, each in enumerate(ids)]
    steps = [event for event in runner.stream(requests) if isinstance(event, Stepped) and event.phase == phase]
    if total:
        return sum(step.wall_seconds for step in steps)
    return median(step.wall_seconds for step in steps if step.decode_tokens == count)


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
