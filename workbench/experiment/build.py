"""Build the runner and the requests of an experiment, and the experiment that a runner carries out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workbench.engine.inputs import make_request
from workbench.engine.runner import Runner
from workbench.engine.uncached import disable_cache, executor_settings
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment, PromptsWorkload, RandomWorkload
from workbench.progress import to_stderr
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.settings import Settings
from workbench.simulate.arrival import Arrival, request_from_arrival
from workbench.simulate.executor_settings import UncachedExecutor
from workbench.simulate.source import source_of
from workbench.simulate.traffic_settings import ClosedLoop, TrafficWorkload


def requests_of(experiment: Experiment, tokenizer: Tokenizer | None, vocab: int) -> list[Request]:
    """Build the experiment's requests, the same every time. A text that cannot be encoded becomes a request to be
    refused."""
    workload = experiment.workload
    if isinstance(workload, RandomWorkload):
        return _random(workload, experiment.sampling, vocab)
    if isinstance(workload, TrafficWorkload):
        return _traffic(workload, experiment.sampling, vocab)
    if not isinstance(workload, PromptsWorkload):
        raise WorkbenchError(f"a workload of kind {workload.kind!r} has no requests to run: it is measured as a whole")
    if tokenizer is None:
        name = experiment.model.name
        raise WorkbenchError(f"workload.prompts: model {name!r} has no tokenizer; use `workload: {{kind: random}}`")
    assert isinstance(workload, PromptsWorkload)  # the others are comparisons, which make their own requests
    return _prompts(workload, experiment.sampling, tokenizer)


def clients_of(experiment: Experiment) -> tuple[int, float] | None:
    """Return the number of closed-loop clients and their pause in seconds; None for requests with arrival times."""
    arrivals = getattr(experiment.workload, "arrivals", None)
    if not isinstance(arrivals, ClosedLoop):
        return None
    return arrivals.clients, arrivals.think * getattr(experiment.workload, "time", 1.0)


def arrivals_of(workload: TrafficWorkload) -> list[Arrival]:
    """Return all arrivals of a finite traffic; those of a closed loop in the order of asking, at second 0."""
    source = source_of(workload)
    coming = list(source.initial_arrivals())
    while (arrival := source.next_after_finish(0.0)) is not None:
        coming.append(replace(arrival, time=0.0))
    return coming


def _traffic(workload: TrafficWorkload, sampling: SamplingParameters, vocab: int) -> list[Request]:
    return [
        request_from_arrival(
            arrival, f"request-{index}", vocab, sampling.model_copy(update={"seed": (sampling.seed + index) % 2**63})
        )
        for index, arrival in enumerate(arrivals_of(workload))
    ]


def _prompts(workload: PromptsWorkload, sampling: SamplingParameters, tokenizer: Tokenizer | None) -> list[Request]:
    texts = [text for text in workload.prompts for _ in range(workload.copies)]
    return [
        make_request(text, tokenizer, sampling.model_copy(update={"seed": sampling.seed + index}), f"request-{index}")
        for index, text in enumerate(texts)
    ]


def _random(workload: RandomWorkload, sampling: SamplingParameters, vocab: int) -> list[Request]:
    draw = random.Random(workload.seed)
    asked = {"max_tokens": workload.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": ()}
    return [
        Request(
            f"request-{index}",
            random_token_ids(draw, vocab, workload.prompt_tokens),
            sampling.model_copy(update={**asked, "seed": sampling.seed + index}),
        )
        for index in range(workload.requests)
    ]


def runner_for(experiment: Experiment, on_progress: Callable[[str], None] = to_stderr, **arguments: Any) -> Runner:
    """Build the runner of an experiment; `arguments` (clock, listener, ...) are passed on to `Runner`.

    experiment = workbench.Experiment.from_file("experiments/first_light.yaml")
    runner = workbench.runner_for(experiment)
    """
    runner = Runner(experiment, report=on_progress, **arguments)
    if isinstance(experiment.executor, UncachedExecutor):
        disable_cache(runner, experiment.executor.oracle)
    return runner


def experiment_of_runner(runner: Runner, question: str, workload: Mapping[str, Any]) -> Experiment:
    """Return the experiment whose runner `runner` is.

    Raises:
        WorkbenchError: where no settings express it: a runner around a model that was put together by hand, or a policy
            that is an object of one's own.
    """
    config, executor = runner.config, executor_settings(runner.core.executor)
    policies = {"schedule.policy": config.schedule.policy, "cache.evict": config.cache.evict}
    own = [name for name, value in policies.items() if value is not None and not isinstance(value, Settings)]
    if not runner.is_from_config or own:
        what = f"its {own[0]} is an object" if own else "its model was put together by hand"
        raise WorkbenchError(f"no settings describe this runner, since {what}: give an Experiment")
    values = {"question": question, **config.model_dump(mode="json"), "workload": dict(workload), "executor": executor}
    return Experiment.from_values(values, "this runner")
