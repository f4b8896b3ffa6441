"""Python ends in the middle of a stream: the process ends, with the status that the script gives."""

from __future__ import annotations

import pytest

from tests.helpers.processes import python

BEGIN = """
import workbench
from workbench.engine.runner_thread import RunnerThread
thread = RunnerThread.attach(workbench.Runner(workbench.EngineConfig()))
asked = thread.submit(["def fib(n):"] * 8, max_tokens=900, ignore_eos=True)
events = iter(asked)
for _ in range(40):
    next(events)
"""
ENDS = {
    "a stream that is still referenced": "",  # its generator is closed while Python ends
    "a handle alone": "events = None; asked = thread.submit(['def f'] * 8, max_tokens=900, ignore_eos=True)",
    "another job at the end": """
import atexit
@atexit.register
def ask():
    try:
        thread.call(lambda runner: None)
    except workbench.WorkbenchError as error:
        print(error)
from workbench.engine.runner_thread import _close_threads
_close_threads()
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_in_the_middle_of_a_stream(end: str) -> None:
    """A thread that Python ended within a step would abort the process; a cancel that began a thread would hang it."""
    ran = python("-c", BEGIN + ENDS[end] + "\nraise SystemExit(3)")
    assert ran.returncode == 3 and not {"Traceback", "terminate"} & {*ran.stderr.split()}, ran.stderr
    assert ran.stdout == ("the runner's thread was closed, since Python ends\n" if "another job" in end else "")
