"""Measure the determinism of greedy answers: repeat one prompt in varying batch compositions, and count the outputs
that differ bit for bit.

The cost of `batch_invariant` is measured by timing steps of all variants in turn: it is the ratio of two variants that
differ only in this setting.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, Rows, VariantResults, Workload
from workbench.experiment.variants import described, every_variant
from workbench.experiment.verdict import VariantRows
from workbench.figures.bars import Bar, bars
from workbench.figures.figure import Figure, beside
from workbench.measure.rounds import check_full_length, greedy_sampling, load_runners, measure_in_rounds
from workbench.progress import StageCounter
from workbench.request import Request, random_token_ids
from workbench.settings import Count, Seed, Settings
from workbench.svg import Axis
from workbench.trace.events import Decoded, Stepped
from workbench.units import Measure, duration, ratio

Costs = dict[str, dict[str, float]]
TIMED_PHASES = ("prefill", "decode_one", "decode_many")
REPEATED_REQUEST = "repeated"  # request id of the repeated prompt; the ids of other requests end in numbers
EXPENSIVE_RATIO = 2.0  # a ratio of times from which the mode counts as expensive
COUNTS = {"varying_outputs": "outputs", "varying_bits": "sets of bits"}
PRICES = {"price_prefill": "prefill", "price_decode_one": "decode of one", "price_decode_many": "decode of many"}


class OverheadSettings(Settings):
    """Settings for measuring the cost of `batch_invariant`: a prefill of one prompt, decode steps of one sequence,
    decode steps of many sequences.
    """

    model: str | None = None  # model that is timed; None: the one whose outputs are compared
    prefill_tokens: Count = 512
    context: Count = 256  # tokens of the prompt of each timed sequence
    batch: Annotated[int, Field(ge=2)] = 16
    tokens: Annotated[int, Field(ge=3)] = 12  # output tokens of each sequence
    rounds: Count = 5


class DeterminismWorkload(Workload):
    """Run each prompt greedily in `runs` different batch compositions, and `repeats` times in the first composition."""

    measures: ClassVar = (
        Measure("varying_outputs", "outputs in varying batches", better="min"),
        Measure("varying_bits", "sets of bits in varying batches", better="min"),
        Measure("same_outputs", "outputs in the same batch", better="min"),
        Measure("same_bits", "sets of bits in the same batch", better="min"),
        Measure("diverged_prompts", "diverged prompts", better="min"),
        duration("prefill_s", "prefill"),
        duration("decode_one_s", "decode step of one sequence"),
        duration("decode_many_s", "decode step of many sequences"),
        ratio("price_prefill", "prefill, ratio"),
        ratio("price_decode_one", "decode of one, ratio"),
        ratio("price_decode_many", "decode of many, ratio"),
    )
    kind: Literal["determinism"] = "determinism"
    prompts: Annotated[tuple[str, ...], Field(min_length=1)] | Count = 4  # texts, or the number of random prompts
    prompt_tokens: Count = 48  # tokens of each random prompt
    output_tokens: Count = 128
    runs: Count = 8
    repeats: Count = 3
    other_requests: Count = 15  # maximum number of other requests in a batch
    other_request_tokens: Count = 96  # maximum tokens of another request's prompt, and of its output
    price: OverheadSettings | None = OverheadSettings()
    seed: Seed = 0

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure the determinism of every variant.

        Returns one row for each variant: the number of distinct outputs in varying and in equal batch compositions. If
        another variant differs only in `batch_invariant`, the row also has the cost of that mode."""
        variants = every_variant(experiment)
        prompts = self.prompts if isinstance(self.prompts, int) else len(self.prompts)
        timed = 0 if self.price is None else 2 + self.price.rounds
        on_progress = StageCounter(on_progress, len(variants) * (1 + prompts + timed))
        rows, asked = [], []
        for name, variant in variants.items():
            on_progress(f"loading: {name}")
            runner = runner_for(variant)
            found: list[dict[str, Any]] = []
            for index, prompt in enumerate(_prompts(self, runner)):
                on_progress(f"{name}: prompt {index + 1}")
                turns = [("varying", turn) for turn in range(self.runs)] + [("same", 0)] * self.repeats
                for kind, turn in turns:
                    others = _batch_composition(self, f"{self.seed}/{index}/{turn}", runner.model.spec.vocab_size)
                    found.append(
                        {"prompt": index, "batch_composition": kind, **generate_in_batch(self, runner, prompt, others)}
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
        if self.price is not None:
            costs, tables["times"] = measure_overhead(self.price, variants, self.seed, on_progress)
            for row in rows:
                row |= costs[row["variant"]]
        about = {
            "prompts": len(_distinct_by_prompt(asked, "same", "token_ids")),
            "runs": self.runs,
            "output_tokens": self.output_tokens,
        }
        return VariantResults(rows, about, tables)

    def chart(self, rows: VariantRows, title: str) -> Figure:
        """Draw bars of distinct outputs by variant, and next to them the cost of the mode as ratios of times."""
        counts, ratios = _bars(rows, COUNTS, 1, "d"), _bars(rows, PRICES, EXPENSIVE_RATIO, ".2f")
        shown = [bars(counts, Axis("different answers to one prompt"), width=260)]
        return beside(
            [*shown, *([bars(ratios, Axis("time with / without batch_invariant"), width=260)] if ratios else [])], title
        )


def measure_overhead(
    settings: OverheadSettings, variants: Mapping[str, Experiment], seed: int, on_progress: Callable[[str], None]
) -> tuple[Costs, Rows]:
    """Time every variant in interleaved rounds after one warm-up round, and return their step times and the cost of
    `batch_invariant`.

    Returns:
        First, for each variant, the seconds of a step (median over the rounds) and `price_...`: the median over rounds
        of the ratio to the variant without the mode. Second, the rows of the rounds.
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
    """Return the seconds of one prefill, of a decode step of one sequence, and of a decode step of `batch`
    sequences."""
    runner.reset_prefix_cache()
    return {
        "prefill": _steps(runner, name, 1, settings.prefill_tokens, 1, "prefill", total=True),
        "decode_one": _steps(runner, name, 1, settings.context, settings.tokens, "decode"),
        "decode_many": _steps(runner, name, settings.batch, settings.context, settings.tokens, "decode"),
    }


def _steps(runner: Runner, name: str, count: int, prompt: int, tokens: int, phase: str, total: bool = False) -> float:
    """Return the total seconds of a phase's steps, or the median seconds of the steps that decode every sequence."""
    draw, vocab = random.Random(name), runner.model.spec.vocab_size
    sampling = greedy_sampling(tokens)
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
    """Return the name of the variant that differs from this one only in `batch_invariant`; None if there is none."""
    mine = variants[name]
    if not mine.batch_invariant:
        return None
    plain = mine.model_copy(update={"batch_invariant": False})
    return next((other for other, variant in variants.items() if variant == plain), None)


def num_distinct_outputs(runs: Sequence[dict[str, Any]], kind: str, key: str) -> int:
    """Return the number of different outputs in batch compositions of one kind (varying or equal), for the prompt that
    has most."""
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
    """Return a prompt's greedy tokens and their log-probabilities, generated while the other requests of
    `batch_composition` run."""
    place, requests = batch_composition
    sampling = greedy_sampling(workload.output_tokens).model_copy(update={"logprobs": 0})
    requests.insert(place, Request(REPEATED_REQUEST, prompt, sampling))
    tokens: list[int] = []
    logprobs: list[float] = []
    for event in runner.stream(requests):
        if isinstance(event, Decoded) and event.request_id == REPEATED_REQUEST:
            tokens.append(event.token_id)
            logprobs.append(cast(float, event.logprob))
        check_full_length(event)
    return {"token_ids": tokens, "logprobs": logprobs, "others": len(requests) - 1}


def _prompts(workload: DeterminismWorkload, runner: Runner) -> list[tuple[int, ...]]:
    if isinstance(workload.prompts, int):
        draw, vocab = random.Random(workload.seed), runner.model.spec.vocab_size
        return [random_token_ids(draw, vocab, workload.prompt_tokens) for _ in range(workload.prompts)]
    if runner.tokenizer is None:
        name = runner.model.spec.name
        raise WorkbenchError(f"workload.prompts: model {name!r} has no tokenizer; give a number of random prompts")
    return [(*runner.tokenizer.bos_token_ids, *runner.tokenizer.encode(text)) for text in workload.prompts]


def _batch_composition(workload: DeterminismWorkload, name: str, vocab: int) -> tuple[int, list[Request]]:
    """Draw other requests of random tokens, and the number of them that are submitted before the prompt."""
    draw = random.Random(name)
    others = []
    for index in range(draw.randint(0, workload.other_requests)):
        ids = random_token_ids(draw, vocab, draw.randint(1, workload.other_request_tokens))
        most = draw.randint(1, workload.other_request_tokens)
        sampling = greedy_sampling(most)
        others.append(Request(f"other-{index}", ids, sampling))
    return draw.randint(0, len(others)), others


def _bars(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], most: float, form: str) -> list[Bar]:
    """Return a bar for each of these values; a bar above `most` is marked as bad."""
    return [
        Bar(f"{row['variant']}: {label}", row[name], bad=row[name] > most, words=f"{row[name]:{form}}")
        for row in rows
        for name, label in names.items()
        if name in row
    ]
