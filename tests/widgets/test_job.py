"""A job in the background: it ends once, says why it broke, and stops where it is asked to."""

from __future__ import annotations

import threading

import pytest

from tests.patience import limit
from workbench.errors import WorkbenchError
from workbench.widgets import job as module
from workbench.widgets.job import Job


def test_its_end_is_handled_before_a_wait_returns() -> None:
    seen: list[object] = []
    job = Job(lambda job: seen.append(job.done), lambda job: seen.append((job.error, job.done))).start()
    assert job.wait(limit(30)) and job.done and seen == [False, ("", False)]


def test_what_it_raises_is_described() -> None:
    def work(_: Job) -> None:
        raise WorkbenchError("no such model")

    job = Job(work).start()
    assert job.wait(limit(30)) and job.error == "no such model" and not job.stopped


def test_work_that_ends_its_thread_ends_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def leave(_: Job) -> None:
        raise SystemExit

    assert Job(leave).start().wait(limit(30))


def test_an_end_that_breaks_ends_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert Job(lambda _: None, lambda _: 1 / 0).start().wait(limit(30))


def test_stopping_ends_what_it_waits_for_and_nothing_once_it_is_over() -> None:
    waited, stops = threading.Event(), list[int]()

    def stop() -> None:
        stops.append(1)
        waited.set()

    job = Job(lambda _: waited.wait(limit(30)), on_stop=stop).start()
    assert not job.done
    job.stop()
    assert job.wait(limit(30)) and job.stopped and stops == [1]
    job.stop()
    assert stops == [1]


def test_an_interrupt_of_a_wait_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = threading.Event()
    job = Job(lambda _: waited.wait(limit(30)), on_stop=waited.set).start()

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "wait_and_serve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.wait()
    assert job.stopped and job.wait(limit(30))
