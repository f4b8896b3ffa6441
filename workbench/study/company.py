"""Determinism of a greedy answer: repeat one prompt in varying batch compositions and count different outputs, bit for
bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.stages import StageCounter
from workbench.study.company_price import measure_overhead
from workbench.study.company_workload import DeterminismWorkload
from workbench.study.experiment import Experiment
from workbench.study.findings import VariantResults
from workbench.study.runner_for import runner_for
from workbench.study.variants import every_variant, settings_text
from workbench.trace.events import Decoded, Finished

ProgressCallback = Callable[[str], None]
REPEATED_REQUEST = "repeated"  # id of the repeated request; the others' ids end in numbers


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
                found.append({"prompt": index, "batch_composition": kind, **generate_in_batch(work, runner, prompt, others)})
        asked += [{"variant": name, **each} for each in found]
        rows.append({
            "variant": name, "settings": settings_text(experiment, name), "backend": str(runner.backends),
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
        return [tuple(draw.randrange(vocab) for _ in range(workload.prompt_tokens)) for _ in range(workload.prompts)]
    if runner.tokenizer is None:
        name = runner.model.spec.name
        raise WorkbenchError(f"workload.prompts: model {name!r} has no tokenizer; say how many prompts, as a number")
    return [(*runner.tokenizer.bos_token_ids, *runner.tokenizer.encode(text)) for text in workload.prompts]


def _batch_composition(workload: DeterminismWorkload, name: str, vocab: int) -> tuple[int, list[Request]]:
    """Draw other requests of random tokens, and the number of them that precede the prompt."""
    draw = random.Random(name)
    others = []
    for index in range(draw.randint(0, workload.other_requests)):
        ids = tuple(draw.randrange(vocab) for _ in range(draw.randint(1, workload.other_request_tokens)))
        most = draw.randint(1, workload.other_request_tokens)
        sampling = SamplingParameters(temperature=0.0, max_tokens=most, ignore_eos=True)
        others.append(Request(f"other-{index}", ids, sampling))
    return draw.randint(0, len(others)), others
