"""Time the compiled functions of an executor: each call from Python is timed by itself, as long as it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from workbench.executors.base import Executor, FallbackExecutor, MlirExecutor
from workbench.executors.contention import StepThreads
from workbench.executors.inductor import InductorExecutor
from workbench.executors.prefill import SIDES, PrefillExecutor


class CallTimer(Protocol):
    """Anything that times calls."""

    def timed(self, function: Callable[..., Any], timer: str | Callable[..., str]) -> Callable[..., Any]:
        """Return `function` with its calls timed under a name, or under what a function of its arguments says."""
        ...


def time_threads(timer: CallTimer, threads: StepThreads) -> None:
    """Time the compiled functions that hold blocks, the head, or all of a step, which `threads` run."""
    names = {"blocks": "all blocks", "head": "head"}
    threads.run = timer.timed(threads.run, lambda shape, *_: names.get(str(shape).partition(" ")[0], "whole step"))  # type: ignore[method-assign] (of one object, which is used for nothing else)


def time_functions_of(timer: CallTimer, executor: Executor, tokens: int) -> None:
    """Time the compiled functions that an executor calls itself; it is used for nothing else. Their names are those in
    a graph of the model. `tokens` are those of the steps to come."""
    if isinstance(executor, MlirExecutor):
        time_functions_of(timer, executor.prefill_executor, tokens)
    elif isinstance(executor, FallbackExecutor):
        time_functions_of(timer, executor.executor, tokens)
    elif isinstance(executor, PrefillExecutor):
        for layer, block in enumerate(executor._for(tokens)):
            for side in SIDES:
                setattr(block, side, timer.timed(getattr(block, side), f"{side} attention {layer}"))
    elif isinstance(executor, InductorExecutor):
        executor.head = timer.timed(executor.head, "head")
        executor._step = timer.timed(executor._step, "whole step")
        for layer, (block, sides) in enumerate(tuple(executor._sides.items())):
            executor._sides[block] = replace(
                sides,
                whole=timer.timed(sides.whole, f"block {layer}"),
                before=timer.timed(sides.before, f"before attention {layer}"),
                after=timer.timed(sides.after, f"after attention {layer}"),
            )
