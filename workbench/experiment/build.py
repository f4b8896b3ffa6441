"""Build requests from an experiment's workload, and the experiment that a runner carries out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from workbench.engine.inputs import make_request
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import (
    CacheSettings,
    Experiment,
    ModelSettings,
    PromptsWorkload,
    RandomWorkload,
    SchedulerSettings,
)
from workbench.kv_cache.format import parse_cache_format
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import Request, SamplingParameters
from workbench.simulate.arrival import Arrival, request_from_arrival
from workbench.simulate.source import source_of
from workbench.simulate.traffic_settings import ClosedLoop, TrafficWorkload

TOP_LEVEL_SETTINGS = ("backend", "compile", "batch_invariant", "attention", "speculate", "executor")
PAGE_SETTINGS = ("page_size", "pages", "prefix", "offload", "evict")  # arguments of `load` beside the cache's format


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
            tuple(draw.randrange(vocab) for _ in range(workload.prompt_tokens)),
            sampling.model_copy(update={**asked, "seed": sampling.seed + index}),
        )
        for index in range(workload.requests)
    ]


def experiment_of_runner(runner: Runner, question: str, workload: Mapping[str, Any]) -> Experiment:
    """Return the experiment whose runner `runner` is.

    Raises WorkbenchError where no settings express it: a runner that neither `load` nor `runner_for` built, or a policy
    that is a user-defined object."""
    if not runner.load_arguments:
        raise WorkbenchError("this runner was put together by hand, which no settings describe: give an Experiment")
    asked = {name: _plain(value) for name, value in runner.load_arguments.items()}
    cache = parse_cache_format(runner.load_arguments["cache"]).model_dump(mode="json")
    return Experiment.from_values(
        {
            "question": question,
            "model": {"name": asked["model"], **_of(ModelSettings, asked)},
            "cache": {**cache, **_of(CacheSettings, {name: asked[name] for name in PAGE_SETTINGS})},
            "schedule": {"kind": asked["schedule"], **_of(SchedulerSettings, asked)},
            "workload": dict(workload),
            **{name: asked[name] for name in TOP_LEVEL_SETTINGS if asked.get(name) is not None},
        },
        "this runner",
    )


def _of(part: type[BaseModel], asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asked[name] for name in part.model_fields if name in asked}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return str(value).removeprefix("torch.") if isinstance(value, Path | torch.dtype) else value
