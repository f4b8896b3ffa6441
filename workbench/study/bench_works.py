"""Cases of the model benchmark, and one repetition of a case through the runner's public interface."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Event, Finished, Prefilled, Stepped

PromptAndOutput = tuple[int, int]  # prompt tokens, output tokens


@dataclass(frozen=True)
class BenchCase:
    """One case to time, for `batch` sequences at once.

    `prefill` times the `prompt` tokens after `depth` others; `decode` times `output` tokens after both. `mixed` times
    requests of mixed `lengths` from the first to the last token."""

    kind: Literal["prefill", "decode", "mixed"]
    batch: int
    depth: int = 0
    prompt: int = 512
    output: int = 128
    lengths: tuple[PromptAndOutput, ...] = ()

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        if self.kind == "mixed":
            return max(prompt + output for prompt, output in self.lengths)
        return self.depth + self.prompt + (self.output if self.kind == "decode" else 1)


@dataclass(frozen=True)
class BenchRepetition:
    """One repetition of a case.

    Holds the tokens and their wall and forward seconds, the minimum FLOPs and bytes of these steps, bytes of cache in
    use, and the number of graphs compiled meanwhile."""

    tokens: int
    wall_seconds: float
    forward_seconds: float
    flops: float
    bytes: float
    kv_bytes: int
    compiles: int
    step_seconds: tuple[float, ...]
    kernel_seconds: float | None = None  # of the forward seconds, in compiled code; None where it was not reported


def run_repetition(runner: Runner, case: BenchCase, seed: int) -> BenchRepetition:
    """Run a case once, with prompts drawn from `seed`. Raises WorkbenchError where a request does not run."""
    before, steps = runner.executor.compiles, list(_measured_steps(runner, case, seed))
    kernels = [step.kernel_seconds for step in steps if step.kernel_seconds is not None]
    return BenchRepetition(
        tokens=_tokens(case, steps),
        wall_seconds=math.fsum(step.wall_seconds for step in steps),
        forward_seconds=math.fsum(step.forward_seconds for step in steps),
        flops=math.fsum(step.predicted_flops for step in steps),
        bytes=math.fsum(step.predicted_bytes for step in steps),
        kv_bytes=max(step.kv_bytes for step in steps),
        compiles=runner.executor.compiles - before,
        step_seconds=tuple(step.wall_seconds for step in steps),
        kernel_seconds=math.fsum(kernels) if len(kernels) == len(steps) else None,
    )


def max_sequence_length(case: BenchCase, budget: int) -> int:
    """Return the maximum length of a sequence while a case runs: in decode the first ones keep decoding until the last
    joins."""
    return case.longest + (_waiting_steps(case, budget) if case.kind == "decode" else 0)


def _tokens(case: BenchCase, steps: Sequence[Stepped]) -> int:
    if case.kind == "mixed":  # a prefill step yields the first token of a request
        return sum(output for _, output in case.lengths)
    return sum(step.prefill_tokens if case.kind == "prefill" else step.decode_tokens for step in steps)


def _measured_steps(runner: Runner, case: BenchCase, seed: int) -> Iterator[Stepped]:
    """Yield the steps that count: prefill steps from `depth` on, `output` steps that decode the whole batch, or all
    steps."""
    counted = 0
    for step, prefilled in _steps(runner, _requests(runner, case, seed)):
        if case.kind == "prefill":
            counts = bool(prefilled) and all(each.computed - each.tokens >= case.depth for each in prefilled)
        else:
            counts = case.kind == "mixed" or (step.phase == "decode" and step.decode_tokens == case.batch)
        if counts:
            counted += 1
            yield step
        if case.kind == "decode" and counted == case.output:
            return
    if not counted or case.kind == "decode":
        raise WorkbenchError(f"{case.kind} at depth {case.depth}, batch {case.batch}: the requests ended too soon")


def _steps(runner: Runner, requests: list[Request]) -> Iterator[tuple[Stepped, list[Prefilled]]]:
    """Yield each step with the prefills in it. Closing the iterator cancels the requests that still run."""
    prefilled: list[Prefilled] = []
    events: Iterator[Event] = runner.stream(requests)
    try:
        for event in events:
            if isinstance(event, Prefilled):
                prefilled.append(event)
            elif isinstance(event, Finished) and event.error:
                raise WorkbenchError(f"{event.request_id}: {event.error}")
            elif isinstance(event, Stepped):
                yield event, prefilled
                prefilled = []
    finally:
        events.close()  # type: ignore[attr-defined]


def _requests(runner: Runner, case: BenchCase, seed: int) -> list[Request]:
    draw, vocab = random.Random(f"{case}/{seed}"), runner.model.spec.vocab_size
    waiting = _waiting_steps(case, runner.scheduler.limits.max_num_batched_tokens)
    lengths: Sequence[PromptAndOutput] = case.lengths
    if case.kind != "mixed":
        output = 1 if case.kind == "prefill" else case.output + waiting
        lengths = ((case.depth + case.prompt, output),) * case.batch
    return [
        Request(
            f"bench-{seed}-{index}",
            tuple(draw.randrange(vocab) for _ in range(prompt)),
            SamplingParameters(temperature=0.0, max_tokens=output, ignore_eos=True),
        )
        for index, (prompt, output) in enumerate(lengths)
    ]


def _waiting_steps(case: BenchCase, budget: int) -> int:
    """Return an upper bound of the steps until the last sequence is prefilled: each step has `budget` tokens less the
    decodes."""
    room = max(1, budget - case.batch)
    return case.batch * -(-(case.depth + case.prompt) // room) + 1
