"""Scheduler, pages, prefix index and host under random histories and any policy: integers only, every read checked.

For a soak, ten thousand of them in a minute: python -m tests.engine.many_histories
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.engine import many_histories
from tests.engine.histories import Histories
from tests.thorough import tries
from workbench.request import FinishReason, Sequence
from workbench.scheduler.scheduler import Scheduler

TestHistories = Histories.TestCase
HISTORIES = int(os.environ.get("HISTORIES", "300"))
TestHistories.settings = settings(max_examples=tries(HISTORIES), stateful_step_count=30, deadline=None)


def test_many_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver without hypothesis finds nothing; and a planted bug, by a seed that plays the same history again."""
    assert many_histories.run(range(60)) == {}
    finish = Scheduler.finish

    def keeps_pages(self: Scheduler, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """A planted bug: a request that ends before its children's prefill keeps a page for ever."""
        for pool, pages in zip(self.pools, sequence.pages, strict=False):
            if reason is FinishReason.CANCELLED and any(pages):
                pool.acquire([next(page for page in pages if page)])
        return finish(self, sequence, reason)

    monkeypatch.setattr(Scheduler, "finish", keeps_pages)
    failed = many_histories.run(range(60))
    assert failed
    seed, error = next(iter(failed.items()))
    assert many_histories.run([seed]) == {seed: error}
