"""Requests with a shared prefix: TTFT one after another, and throughput all at once, by variant."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, cast

from compiled_kernels.rounds import interleaved
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import SharedPrefixWorkload
from workbench.experiment.variants import VariantResults, every_variant, settings_text
from workbench.measure.rounds import load_runners
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.trace.events import Decoded, Finished, Submitted

ProgressCallback = Callable[[str], None]


def measure_shared_prefix(experiment: Experiment, on_progress: ProgressCallback = lambda line: None) -> VariantResults:
    """Measure a shared prefix and return one row a variant.

    Rounds are interleaved, each with a prefix of its own, after one warm-up round."""
    work = cast(SharedPrefixWorkload, experiment.workload)
    variants = every_variant(experiment)
    on_progress = StageCounter(on_progress, len(variants) * (work.rounds + 2))
    runners = load_runners(variants, on_progress)
    requests: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    for turn, name in interleaved(runners, work.rounds, on_progress):
        runner, marks = runners[name], {"variant": name, "round": turn}
        alone = _shared_prefix_requests(work, runner.model.spec.vocab_size, f"{turn}/alone")
        found = [time_requests(runner, [request])[0] for request in alone]
        together = _shared_prefix_requests(work, runner.model.spec.vocab_size, f"{turn}/together")
        began = runner.clock()
        served_together = time_requests(runner, together)
        seconds = runner.clock() - began
        if turn:
            requests += [{**marks, "index": index, **each} for index, each in enumerate(found)]
            batches.append({**marks, "seconds": seconds, "token_ids": [each["token_ids"] for each in served_together]})
    rows = [_row(experiment, name, runner, requests, batches) for name, runner in runners.items()]
    for row in rows:
        row["same_tokens"] = _tokens(row["variant"], requests, batches) == _tokens(
            rows[0]["variant"], requests, batches
        )
    return VariantResults(
        rows, {"requests": work.requests, "prefix_tokens": work.prefix_tokens}, {"requests": requests}
    )


def time_requests(runner: Runner, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Run `requests`, all submitted at once, and return a row each: TTFT, tokens, tokens found in the prefix cache."""
    rows: dict[str, dict[str, Any]] = {}
    arrived: dict[str, float] = {}
    for event in runner.stream(list(requests)):
        match event:
            case Submitted():
                arrived[event.request_id] = event.arrival
            case Decoded(index=0):
                rows[event.request_id] = {"ttft_s": event.time - arrived[event.request_id]}
            case Finished():
                if event.reason != "length":
                    raise WorkbenchError(f"{event.request_id}: {event.error or event.reason}")
                rows[event.request_id] |= {
                    "token_ids": list(event.token_ids),
                    "cached_tokens": event.cached_tokens,
                    "computed_tokens": event.computed_tokens,
                    "shared_pages": event.shared_pages,
                }
    return [rows[request.request_id] for request in requests]


def _shared_prefix_requests(workload: SharedPrefixWorkload, vocab: int, name: str) -> list[Request]:
    draw = random.Random(f"{workload.seed}/{name}")
    prefix = random_token_ids(draw, vocab, workload.prefix_tokens)
    sampling = SamplingParameters(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
    return [
        Request(f"{name}/{index}", prefix + random_token_ids(draw, vocab, workload.own_tokens), sampling)
        for index in range(workload.requests)
    ]


def _row(
    experiment: Experiment, name: str, runner: Runner, requests: Sequence[dict], batches: Sequence[dict]
) -> dict[str, Any]:
    mine = [each for each in requests if each["variant"] == name]
    seconds = median(each["seconds"] for each in batches if each["variant"] == name)
    work = cast(SharedPrefixWorkload, experiment.workload)
    return {
        "variant": name,
        "settings": settings_text(experiment, name),
        "backend": str(runner.core.backends),
        "ttft_first_s": median(each["ttft_s"] for each in mine if each["index"] == 0),
        "ttft_s": median([each["ttft_s"] for each in mine if each["index"]] or [mine[0]["ttft_s"]]),
        "cached_tokens": median([each["cached_tokens"] for each in mine if each["index"]] or [0]),
        "requests_per_s": work.requests / seconds,
        "output_tokens_per_s": work.requests * work.output_tokens / seconds,
    }


def _tokens(name: str, requests: Sequence[dict], batches: Sequence[dict]) -> list:
    return [each["token_ids"] for each in (*requests, *batches) if each["variant"] == name]
