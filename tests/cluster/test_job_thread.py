"""A thread of jobs: whatever a job raises, the next one runs."""

from __future__ import annotations

import sys

import pytest

from workbench.cluster.job_thread import JobThread
from workbench.errors import WorkbenchError


def test_a_job_that_exits_ends_nothing_but_itself() -> None:
    failures: list[BaseException] = []
    thread = JobThread("jobs", lambda: "they ended", lambda: None, lambda: None, failures.append)
    assert thread.put(lambda: sys.exit("a listener left"))
    assert thread.ask(lambda: 1) == 1 and [str(error) for error in failures] == ["a listener left"]
    assert thread.close(lambda: failures.clear())
    thread.join()
    assert failures == [] and not thread.put(lambda: None)
    with pytest.raises(WorkbenchError, match="they ended"):
        thread.ask(lambda: 2)
