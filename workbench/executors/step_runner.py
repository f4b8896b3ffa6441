"""Run steps: compute the logits of a plan.

    plan -> hooks -> the first program of the table that accepts it -> pack -> call -> logits

An unchecked program, one whose code was not compiled here before, is replaced by the eager modules if its first step
fails with a compiler error and theirs succeeds. Only errors are detected; results are not compared.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compiled_kernels import Backend, BackendError
from compiled_kernels.correct_backend import COMPILER_ERRORS
from workbench.errors import WorkbenchError
from workbench.executors.contention import StepThreads
from workbench.executors.evicting import EvictionObserver
from workbench.executors.guards import ModelGuard
from workbench.executors.packing import synchronized
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.programs.kernels import StepKernels, unknown
from workbench.executors.programs.program import Call, StepProgram
from workbench.request import Request, Sequence
from workbench.scheduler.plan import Span, StepPlan

OBSERVED = "observed"  # the program of observed steps only (see `observe`)
MAX_MESSAGE_CHARACTERS = 300  # characters of a compiler's message
Forward = Callable[[StepPlan], Tensor]
StepHook = Callable[[Forward, StepPlan], Tensor]  # calls `forward`, and may change the plan or the logits


class StepRunner:
    """A table of programs that compute plans; they are asked in order, and the first that accepts a plan computes it.

    `kernel_seconds` is the time of the last step in compiled functions; None if it had other work.
    """

    def __init__(self, *programs: StepProgram, threads: StepThreads | None = None, unchecked: tuple[str, ...] = (),
                 on_fallback: Callable[[str], None] = lambda why: None,
                 within: Callable[[], AbstractContextManager] = nullcontext):  # fmt: skip
        """Create the table of programs by kind.

        Args:
            programs: programs of one model; the last accepts any plan.
            threads: the runner of compiled functions of `programs`.
            unchecked: kinds of programs that may fall back.
            on_fallback: receives the reason of a fallback, one line.
            within: returns a context manager that is entered around each step.
        """
        self.programs = {program.kind: program for program in programs}
        self.model, self.hooks = programs[0].model, list[StepHook]()
        self.kernel_seconds: float | None = None
        self.threads, self.within, self.unchecked = threads or StepThreads(), within, set(unchecked)
        self._fell_back = on_fallback
        self._guard = ModelGuard(self.model) if any(program.resets for program in programs) else None
        self.observer: EvictionObserver | None = None

    @property
    def compiles(self) -> int:
        """Return the number of functions compiled so far."""
        return sum(each.made for kind, each in self.programs.items() if kind != OBSERVED)  # it shares graphs

    @property
    def artifacts(self) -> Mapping[str, str]:
        """Return the digests of all compiled code, by name."""
        table = reversed(self.programs.values())
        return {name: digest for program in table for name, digest in program.artifacts.items()}

    @property
    def gathers_logits(self) -> bool:
        """Return whether logits are gathered from several ranks, and no hook reads them."""
        return not self.hooks and any(program.gathers_logits for program in self.programs.values())

    def observe(self, observer: EvictionObserver, program: StepProgram) -> None:
        """Use `program`, over its own store, for the steps that `observer` wants to observe."""
        self.observer, self.programs = observer, {OBSERVED: program, **self.programs}

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute the logits of each span's last `num_logits` tokens, in order: [sample, vocab], with the states of the
        plan's layers as further columns (see early_layers.py).
        """
        forward: Forward = self._forward
        for hook in self.hooks:
            forward = partial(hook, forward)
        return forward(plan)

    def _forward(self, plan: StepPlan) -> Tensor:
        self.kernel_seconds, self.threads.seconds = None, 0.0
        if not plan.spans:  # a hook has removed all spans
            return torch.empty(0, self.model.spec.vocab_size)
        if self._guard is not None and plan.phase != "decode" and self._guard.changed:
            for program in self.programs.values():
                program.reset()
            self._guard = ModelGuard(self.model)
        observed = self.observer is not None and self.observer.begin_step(plan)
        kind, rows = self.find(plan, observed)
        with self.within():
            logits = self._checked(kind, rows) if kind in self.unchecked else self.compute(kind, rows)
        if self.programs[kind].is_timed:
            self.kernel_seconds = self.threads.seconds
        if self.observer is not None and observed:
            self.observer.end_step(plan)
        return logits

    def find(self, plan: StepPlan, observed: bool = False) -> tuple[str, StepPlan]:
        """Return the kind of the program that accepts a plan, and the plan in that program's rows."""
        for kind, program in self.programs.items():
            if (kind == OBSERVED) is observed and (rows := program.accept(plan)) is not None:
                return kind, rows
        raise AssertionError("no program accepts the plan")

    def compute(self, kind: str, plan: StepPlan) -> Tensor:
        """Compute a plan by one program, in one or several calls."""
        program = self.programs[kind]
        calls = program.calls(plan)
        return self._call(program, plan) if calls is None else self._in_calls(program, plan, calls)

    def _call(self, program: StepProgram, plan: StepPlan) -> Tensor:
        logits = synchronized(program(program.pack(plan), plan.layers))
        self.model.count_experts(plan.num_tokens, program.chosen)
        if not program.every_row:
            return logits
        # A slice if every sequence samples, the common case: a selection would copy all logits.
        sampled = [row for row, span in enumerate(plan.spans) if span.num_logits]
        if len(sampled) == len(plan.spans):
            return logits[: len(sampled)]
        return logits.index_select(0, torch.tensor(sampled, dtype=torch.int64, device=logits.device))

    def _in_calls(self, program: StepProgram, plan: StepPlan, calls: Iterator[Call]) -> Tensor:
        """Compute a plan in several calls; each call has the next tokens of each sequence in order."""
        counts = [span.num_logits for span in plan.spans]
        next_rows, whole = [0, *itertools.accumulate(counts)], torch.empty(0)
        for number, (indices, spans) in enumerate(calls):
            logits = self._call(program, replace(plan, spans=spans))
            if number == 0:  # if one call has all logits, they are in order and need no copy
                whole = logits if len(logits) == sum(counts) else logits.new_empty((sum(counts), logits.shape[1]))
            for index, rows in zip(indices, logits.split([span.num_logits for span in spans]), strict=True):
                if len(rows) and whole is not logits:  # never write to the first call's own tensor
                    whole[next_rows[index] : next_rows[index] + len(rows)] = rows
                next_rows[index] += len(rows)
        return whole

    def _checked(self, kind: str, plan: StepPlan) -> Tensor:
        """Compute a plan by an unchecked program; on failure, replace it by the eager modules if they succeed."""
        try:
            logits = self.compute(kind, plan)
        except (WorkbenchError, BackendError):
            raise
        except COMPILER_ERRORS as error:
            logits = self._fall_back(kind, plan, error)
        self.unchecked.discard(kind)
        return logits

    def _fall_back(self, kind: str, plan: StepPlan, error: Exception) -> Tensor:
        """Compute a step again by the eager modules, in the same cache slots, and keep them if that works; otherwise
        raise `error` and leave the table unchanged.
        """
        failed, program = self.model.backend, self.programs[kind]
        self.model.set_backend(Backend.EAGER)
        self.programs[kind] = EagerProgram(self.model, program.store)
        try:
            logits = self.compute(kind, plan)
        except BaseException as another:
            self.model.set_backend(failed)
            self.programs[kind] = program
            if isinstance(another, Exception):
                raise error from None
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE_CHARACTERS]
        message = f"{failed} does not compile here, prefill on eager ({words})"
        self._fell_back(message)
        warnings.warn(f"backend auto: {message}", stacklevel=4)
        return logits

    def kernels(self, length: int) -> StepKernels:
        """Describe the compiled functions of a step of `length` tokens of one sequence."""
        if self.observer is not None or self.hooks:
            return unknown("a step that is observed", str(self.model.backend))
        sequence = Sequence.from_request(Request("described", (0,) * length), 0)
        kind, _ = self.find(StepPlan(0, (Span(sequence, 0, length, True),)))
        return self.programs[kind].kernels(length)
