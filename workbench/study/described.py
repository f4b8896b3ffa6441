"""The experiment that a runner carries out: the inverse of `runner_for`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from workbench.cache.format import cache_format
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.study.experiment import CachePart, Experiment, ModelPart, SchedulePart

TOP = ("lane", "compile", "batch_invariant", "attention", "speculate", "executor")
PAGED = ("page_size", "pages", "prefix", "offload", "evict")  # arguments of `load` beside the cache's format


def described(runner: Runner, question: str, workload: Mapping[str, Any]) -> Experiment:
    """Return the experiment whose runner `runner` is.

    Raises WorkbenchError where no settings express it: a runner that neither `load` nor `runner_for` built, or a policy
    that is a user-defined object."""
    if not runner.asked:
        raise WorkbenchError("this runner was put together by hand, which no settings describe: give an Experiment")
    asked = {name: _plain(value) for name, value in runner.asked.items()}
    cache = cache_format(runner.asked["cache"]).model_dump(mode="json")
    return Experiment.of(
        {
            "question": question,
            "model": {"name": asked["model"], **_of(ModelPart, asked)},
            "cache": {**cache, **_of(CachePart, {name: asked[name] for name in PAGED})},
            "schedule": {"kind": asked["schedule"], **_of(SchedulePart, asked)},
            "workload": dict(workload),
            **{name: asked[name] for name in TOP if asked.get(name) is not None},
        },
        "this runner",
    )



def _of(part: type[BaseModel], asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asked[name] for name in part.model_fields if name in asked}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return str(value).removeprefix("torch.") if isinstance(value, Path | torch.dtype) else value
