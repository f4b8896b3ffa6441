"""Streaming compared with whole answers: the cost of each way of delivery, and the time to the first visible text."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, cast

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.stages import StageCounter
from workbench.study.delivery import StreamingClient, deliver
from workbench.study.experiment import Experiment
from workbench.study.findings import VariantResults
from workbench.study.metrics import percentile
from workbench.study.runner_for import runner_for
from workbench.study.streaming_prediction import predicted_rates
from workbench.study.streaming_workload import StreamingWorkload
from workbench.study.variants import every_variant, settings_text
from workbench.trace.events import Event, Finished

MEDIANS = ("seconds", "output_tokens_per_s", "visible_s_p50", "e2el_s_p50", "messages")


def measure_streaming(experiment: Experiment, on_progress: Callable[[str], None] = lambda line: None) -> VariantResults:
    """Measure delivery and return one row a variant: medians over interleaved rounds, with the predicted rate.

    Variants that differ only in their workload share a runner, so that the weights lie at the same addresses."""
    variants = every_variant(experiment) or {"as given": experiment}
    on_progress = StageCounter(on_progress, 1 + len(variants) * (cast(StreamingWorkload, experiment.workload).rounds + 2))
    runners: dict[str, Runner] = {}
    mine: dict[str, Runner] = {}
    for name, variant in variants.items():
        key = variant.model_copy(update={"workload": experiment.workload}).to_yaml()
        if key not in runners:
            on_progress(f"loading: {name}")
            runners[key] = runner_for(variant)
        mine[name] = runners[key]
        if mine[name].tokenizer is None:
            raise WorkbenchError(f"variants.{name}: model {variant.model.name!r} has no tokenizer, so no text to give")
    on_progress("predicting")
    predicted = {name: predicted_rates(variant, mine[name]) for name, variant in variants.items()}
    rounds: list[dict[str, Any]] = []
    for turn in range(cast(StreamingWorkload, experiment.workload).rounds + 1):
        order = list(mine.items())
        for name, runner in order if turn % 2 else reversed(order):  # who comes first has no advantage
            on_progress(f"{f'round {turn}' if turn else 'warm-up'}: {name}")
            runner.reset_prefix_cache()
            found = run_streaming_round(runner, variants[name], turn)
            if turn:
                rounds.append({"variant": name, "round": turn, **found})
    rows = [_row(experiment, name, mine[name], rounds, predicted[name]) for name in variants]
    about = {"workload": experiment.workload.model_dump(mode="json"), "predicted": predicted}
    return VariantResults(rows, about, {"rounds": rounds})


def run_streaming_round(runner: Runner, experiment: Experiment, round_index: int) -> dict[str, Any]:
    """Run one round and return the seconds from the first arrival to the last message, and the client's timestamps."""
    work = cast(StreamingWorkload, experiment.workload)
    box, owed = deque[Event](), set[str]()
    tokens = 0
    with StreamingClient() as client:
        began = runner.clock()
        try:
            for request in random_requests(experiment, runner.model.spec.vocab_size, round_index):
                owed.add(request.request_id)
                runner.submit(request, box, began)
            while owed:
                if not box:
                    runner.step(box)
                while box:
                    event = box.popleft()
                    deliver(event, work.delivery, client)
                    if isinstance(event, Finished):
                        owed.discard(event.request_id)
                        tokens += len(event.token_ids)
                        if event.reason != "length":
                            raise WorkbenchError(f"{event.request_id}: {event.error or event.reason}")
        finally:
            runner.cancel_all(box)
        seconds = runner.clock() - began
    seen = client.received.values()
    return {
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "visible_s_p50": percentile((first - began for first, *_ in seen), 50),
        "e2el_s_p50": percentile((last - began for _, last, *_ in seen), 50),
        "messages": sum(count for _, _, count, _ in seen),
    }


def random_requests(experiment: Experiment, vocab: int, round_index: int) -> list[Request]:
    """Draw prompts of random tokens, the same for every delivery of a round."""
    work = cast(StreamingWorkload, experiment.workload)
    draw = random.Random(f"{work.seed}/{round_index}")
    asked = {"max_tokens": work.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": (), "n": 1}
    sampling = experiment.sampling.model_copy(update=asked)
    return [
        Request(
            f"request-{number}", tuple(draw.randrange(vocab) for _ in range(work.prompt_tokens)),
            sampling.model_copy(update={"seed": (sampling.seed + number) % 2**63}), final_only=work.delivery == "whole",
        )
        for number in range(work.requests)
    ]  # fmt: skip


def _row(
    experiment: Experiment, name: str, runner: Runner, rounds: list[dict[str, Any]], predicted: Mapping[str, float]
) -> dict[str, Any]:
    mine = [each for each in rounds if each["variant"] == name]
    return {
        "variant": name, "settings": settings_text(experiment, name), "backend": str(runner.backends),
        **{key: median(each[key] for each in mine) for key in MEDIANS},
        "rates": [each["output_tokens_per_s"] for each in mine],
        "predicted_output_tokens_per_s": predicted["output_tokens_per_s"],
        "handling_s_per_token": predicted["handling_s_per_token"],
    }  # fmt: skip
