"""Compute the masks of a step, and continue the searches of tokens that wait, in a separate thread during the forward
pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from workbench.constrained.closing import NodeBudget
from workbench.constrained.constraint import Constraint
from workbench.errors import describe_error

# States that all completion searches of a step may visit, about 25 us each: after the forward pass, where they
# delay the next step, and during it.
MAX_NODES_OF_SAMPLING = 60
MAX_NODES_BESIDE_FORWARD = 240

Masks = dict[Constraint, "NDArray[np.bool_] | str"]  # or the error
Draft = tuple[int, ...]


class MaskWorker:
    """A thread that computes the masks of one step at a time: `start` before the forward pass, `take` after it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[Masks] | None = None
        self._drafts: dict[Constraint, Draft] = {}
        self.seconds = 0.0  # seconds of the last job, in its thread

    def start(self, drafts: Sequence[tuple[Constraint, Draft]]) -> None:
        """Start to compute the mask of each constraint with its draft; do not advance a constraint before `take`."""
        self.wait()
        self._job, self._drafts = None, dict(drafts)
        if drafts:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._job = self._pool.submit(self._compute, drafts)

    def wait(self) -> None:
        """Wait for the remaining work of an interrupted step, if any."""
        if self._job is not None:
            self._job.result()

    def take(self, constraint: Constraint, draft: Draft) -> NDArray[np.bool_] | str:
        """Return the mask of a constraint after its draft: forbidden tokens as rows [1 + draft token, vocab], or the
        error message.
        """
        computed = {} if self._job is None else self._job.result()
        if constraint in computed and self._drafts[constraint] == draft:
            return computed[constraint]
        return compute_rows(constraint, draft)

    def clear(self) -> None:
        """Drop the masks of the step."""
        self._job, self._drafts = None, {}

    def _compute(self, drafts: Sequence[tuple[Constraint, Draft]]) -> Masks:
        began = time.perf_counter()
        rows = {constraint: compute_rows(constraint, draft) for constraint, draft in drafts}
        budget = NodeBudget(MAX_NODES_BESIDE_FORWARD)
        for constraint, _ in drafts:
            try:
                constraint.work(budget)
            except Exception as error:
                rows[constraint] = describe_error(error)
        self.seconds = time.perf_counter() - began
        return rows


def compute_rows(constraint: Constraint, draft: Draft) -> NDArray[np.bool_] | str:
    try:
        return constraint.banned(draft)
    except Exception as error:  # ends only its own request
        return describe_error(error)
