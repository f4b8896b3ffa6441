r"""Keep the engine's state consistent under interrupts, cancellations and failing requests.

`StepLock` defers interrupts (see workbench/interrupts.py) and lets one step, submission or cancellation at a time
change the state. A cancellation may arrive at any moment: from a listener during a step, from another thread or a timer
during the forward pass, from a garbage-collected stream. While the lock is held, the cancellation is recorded, and the
holder executes it before any other work.

    cancel ---> recorded ---> at once, if the lock is free
                        \---> within a step: between two events, and after the forward pass

`forward_isolated` computes a failed step in parts, so that only the requests that cause the failure end with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from workbench.interrupts import DeferInterrupts
from workbench.request import Sequence
from workbench.scheduler.plan import StepPlan


class StepLock:
    """A lock for all work on a runner: `with lock.acquire() as interrupts:`.

    Recorded cancellations are executed on release, and `on_release` is called last. An interrupt inside is deferred to
    the end, or to the point where `interrupts` allows it.
    """

    def __init__(self, has_pending: Callable[[], bool], process: Callable[[], None], on_release: Callable[[], None]):
        self._has_pending, self._process, self._on_release = has_pending, process, on_release
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that holds the lock

    def acquire(self) -> LockedSection:
        """Return a context manager that holds the lock; it waits for other threads, and may be nested in the same
        thread.
        """
        return LockedSection(self)

    def process_pending(self) -> None:
        """Execute the recorded cancellations if the lock is free; otherwise the thread that holds it will."""
        if self._has_pending() and self._lock.acquire(blocking=False):
            self._holder = threading.get_ident()
            self._release()

    def _release(self) -> None:
        try:
            self._process()
            self._on_release()  # before the lock is released: its exceptions belong to this work
        finally:
            self._holder = None
            self._lock.release()
            self.process_pending()  # work recorded in the meantime


class LockedSection:
    def __init__(self, books: StepLock):
        self._books, self._held = books, DeferInterrupts()

    def __enter__(self) -> DeferInterrupts:
        books = self._books
        entered = self._held.__enter__()
        self._within = books._holder == threading.get_ident()
        if not self._within:
            books._lock.acquire()
            books._holder = threading.get_ident()
        return entered

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> Any:
        try:
            if not self._within:
                self._books._release()
        finally:
            self._held.__exit__(kind, error, at)


def forward_isolated(
    forward: Callable[[StepPlan], Tensor], plan: StepPlan
) -> tuple[StepPlan, Tensor, list[tuple[Sequence, Exception]]]:
    """Compute a plan that failed by halves, again and again, until each failure is isolated to one sequence.

    Positions are written again with the same keys and values, and no other state has changed before `commit`. A failure
    that does not recur ends no request.

    Returns:
        the plan without sequences that fail even when computed alone (and without their beams), the logits [sample,
        vocab] of the other sequences, and the error of each failed sequence.
    """
    failed: list[tuple[Sequence, Exception]] = []
    rows: dict[Sequence, Tensor] = {}
    parts = list(reversed(plan.split_in_half()))
    while parts:
        half = parts.pop()
        if not half.spans:
            continue
        try:
            logits = forward(half).clone()  # the output of a step is only valid until the next step
        except Exception as error:
            if len(half.spans) == 1:
                failed.append((half.spans[0].sequence, error))
            else:
                parts += reversed(half.split_in_half())
            continue
        counts = [span.num_logits for span in half.spans]
        rows |= zip((span.sequence for span in half.spans), logits.split(counts), strict=True)
    ended = {each for sequence, _ in failed for each in (sequence, *sequence.beams)}
    spans = tuple(span for span in plan.spans if span.sequence not in ended)
    logits = torch.cat([rows[span.sequence] for span in spans]) if spans else torch.empty(0, 0)
    return replace(plan, spans=spans), logits, failed


def select_logits(plan: StepPlan, remaining: StepPlan, logits: Tensor) -> Tensor:
    """Return the rows of `logits` [sample, vocab], computed for `plan`, that belong to spans of `remaining`."""
    sequences = {span.sequence for span in remaining.spans}
    parts = logits.split([span.num_logits for span in plan.spans])
    rows = [span_rows for span, span_rows in zip(plan.spans, parts, strict=True) if span.sequence in sequences]
    return torch.cat(rows) if rows else logits[:0]
