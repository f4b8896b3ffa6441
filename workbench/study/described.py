"""The experiment that a runner carries out: the inverse of `runner_for`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from workbench.cache.format import parse_cache_format
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.study.experiment import CacheSettings, Experiment, ModelSettings, SchedulerSettings

TOP_LEVEL_SETTINGS = ("backend", "compile", "batch_invariant", "attention", "speculate", "executor")
PAGE_SETTINGS = ("page_size", "pages", "prefix", "offload", "evict")  # arguments of `load` beside the cache's format


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
