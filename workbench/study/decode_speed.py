"""Decode steps of one sequence at several context lengths, timed for many runners in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished, Stepped

ProgressCallback = Callable[[str], None]


def time_decode_steps(
    runners: Mapping[str, Runner], contexts: Sequence[int], tokens: int, rounds: int, on_progress: ProgressCallback = lambda line: None
) -> list[dict]:
    """Time decode steps and return one row a runner and context: the seconds of each step.

    Every round takes `tokens` steps of each runner in turn; one warm-up round comes first."""
    rows = []
    for context in contexts:
        open_ones: dict[str, Iterator[Stepped]] = {}
        try:
            for name, runner in runners.items():
                on_progress(f"decode at {context:,}: {name}")
                open_ones[name] = _decoding(runner, context, tokens * (rounds + 1))
                _take(open_ones[name], tokens)  # prefill, and what is compiled
            seconds: dict[str, list[float]] = {name: [] for name in runners}
            for _ in range(rounds):
                for name, steps in open_ones.items():
                    seconds[name] += [step.wall_seconds for step in _take(steps, tokens)]
        finally:
            for steps in open_ones.values():
                steps.close()  # type: ignore[attr-defined]
        rows += [
            {
                "variant": name, "context": context, "backend": str(runner.backends),
                "tokens_per_s": 1 / median(seconds[name]), "step_s": seconds[name],
            }
            for name, runner in runners.items()
        ]  # fmt: skip
    return rows


def _take(steps: Iterator[Stepped], count: int) -> list[Stepped]:
    return [next(steps) for _ in range(count)]


def _decoding(runner: Runner, context: int, tokens: int) -> Iterator[Stepped]:
    """Yield the decode steps of one sequence from `context` prompt tokens on."""
    draw = random.Random(context)
    prompt = tuple(draw.randrange(runner.model.spec.vocab_size) for _ in range(context))
    sampling = SamplingParameters(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    events = runner.stream([Request(f"decode-{context}", prompt, sampling)])
    try:
        for event in events:
            if isinstance(event, Finished) and event.reason != "length":
                raise WorkbenchError(f"decode at a context of {context}: {event.error or event.reason}")
            if isinstance(event, Stepped) and event.phase == "decode":
                yield event
    finally:
        events.close()  # type: ignore[attr-defined]
