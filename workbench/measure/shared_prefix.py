"""Measure requests with a shared prefix: TTFT one after another, and throughput all at once, by variant."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Any, ClassVar, Literal, cast

from compiled_kernels.rounds import interleaved
from workbench.engine.runner import Runner
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, VariantResults, Workload
from workbench.experiment.variants import described, every_variant
from workbench.measure.rounds import check_full_length, greedy_sampling, load_runners
from workbench.progress import StageCounter
from workbench.request import Request, random_token_ids
from workbench.settings import Count, Seed
from workbench.trace.events import Decoded, Finished, Submitted
from workbench.units import Measure, duration, rate


class SharedPrefixWorkload(Workload):
    """Run requests with a shared prefix and different ends: one after another (TTFT), then all at once (throughput)."""

    measures: ClassVar = (
        duration("ttft_first_s", "first TTFT"),
        Measure("cached_tokens", "cached tokens", "tokens", "max"),
        rate("requests_per_s", "request rate", "requests"),
    )
    kind: Literal["shared_prefix"] = "shared_prefix"
    requests: Count = 8
    prefix_tokens: Count = 1000
    own_tokens: Count = 16
    output_tokens: Count = 8
    rounds: Count = 1
    seed: Seed = 0

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure a shared prefix and return one row for each variant.

        Rounds are interleaved, each with its own prefix, after one warm-up round."""
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, len(variants) * (self.rounds + 2))
        runners = load_runners(variants, on_progress)
        requests: list[dict[str, Any]] = []
        batches: list[dict[str, Any]] = []
        for turn, name in interleaved(runners, self.rounds, on_progress):
            runner, marks = runners[name], {"variant": name, "round": turn}
            alone = _shared_prefix_requests(self, runner.model.spec.vocab_size, f"{turn}/alone")
            found = [time_requests(runner, [request])[0] for request in alone]
            together = _shared_prefix_requests(self, runner.model.spec.vocab_size, f"{turn}/together")
            began = runner.clock()
            served_together = time_requests(runner, together)
            seconds = runner.clock() - began
            if turn:
                requests += [{**marks, "index": index, **each} for index, each in enumerate(found)]
                batches.append(
                    {**marks, "seconds": seconds, "token_ids": [each["token_ids"] for each in served_together]}
                )
        rows = [_row(experiment, name, runner, requests, batches) for name, runner in runners.items()]
        for row in rows:
            row["same_tokens"] = _tokens(row["variant"], requests, batches) == _tokens(
                rows[0]["variant"], requests, batches
            )
        return VariantResults(
            rows, {"requests": self.requests, "prefix_tokens": self.prefix_tokens}, {"requests": requests}
        )


def time_requests(runner: Runner, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Run `requests`, all submitted at once. Return a row for each: TTFT, tokens, tokens found in the prefix cache."""
    rows: dict[str, dict[str, Any]] = {}
    arrived: dict[str, float] = {}
    for event in runner.stream(list(requests)):
        match event:
            case Submitted():
                arrived[event.request_id] = event.arrival
            case Decoded(index=0):
                rows[event.request_id] = {"ttft_s": event.time - arrived[event.request_id]}
            case Finished():
                check_full_length(event)
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
    sampling = greedy_sampling(workload.output_tokens)
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
        **described(experiment, name, runner.core.backends),
        "ttft_first_s": median(each["ttft_s"] for each in mine if each["index"] == 0),
        "ttft_s": median([each["ttft_s"] for each in mine if each["index"]] or [mine[0]["ttft_s"]]),
        "cached_tokens": median([each["cached_tokens"] for each in mine if each["index"]] or [0]),
        "requests_per_s": work.requests / seconds,
        "output_tokens_per_s": work.requests * work.output_tokens / seconds,
    }


def _tokens(name: str, requests: Sequence[dict], batches: Sequence[dict]) -> list:
    return [each["token_ids"] for each in (*requests, *batches) if each["variant"] == name]
