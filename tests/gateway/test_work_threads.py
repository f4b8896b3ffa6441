"""Work beside the event loop: errors and deadlines cost the work that has them, and nothing waits for what hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.event_loop import run_async
from tests.patience import limit
from workbench.errors import WorkbenchError
from workbench.gateway.work_threads import WorkThreads


def test_the_loop_goes_on_while_work_runs() -> None:
    async def run() -> None:
        threads, done = WorkThreads(), threading.Event()
        work = asyncio.create_task(threads.run(lambda: done.wait(limit(60))))
        await asyncio.sleep(0)
        done.set()  # in the loop: were the work there, it would end by its limit, and return False
        assert await work

    run_async(run())


def test_no_more_run_at_once_than_there_are_threads() -> None:
    async def run() -> None:
        threads, lock, running, most = WorkThreads(2), threading.Lock(), 0, 0
        pair = threading.Barrier(2)  # work ends in pairs: two always run at once, and any third would be seen

        def work() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            pair.wait()
            with lock:
                running -= 1

        await asyncio.gather(*(threads.run(work) for _ in range(20)))
        assert most == 2 and running == 0

    run_async(run())


def test_what_hangs_is_left_alone_until_it_returns() -> None:
    async def run() -> None:
        threads, wakes = WorkThreads(num_threads=1, max_hanging=2), threading.Event()
        for number in range(2):
            with pytest.raises(TimeoutError):
                await threads.run(wakes.wait, 0.01)
            assert threads.num_hanging == number + 1
            if not number:
                assert await threads.run(lambda: 5) == 5
        with pytest.raises(WorkbenchError, match="2 functions did not return in time"):
            await threads.run(lambda: 5)
        wakes.set()
        while threads.num_hanging:
            await asyncio.sleep(0.01)
        assert await threads.run(lambda: 5) == 5

    run_async(run())


def test_what_waits_too_long_for_its_turn_is_late_and_hangs_not() -> None:
    async def run() -> None:
        threads, wakes = WorkThreads(num_threads=1), threading.Event()
        first = asyncio.create_task(threads.run(wakes.wait))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await threads.run(lambda: 5, 0.01)
        assert threads.num_hanging == 0
        wakes.set()
        assert await first

    run_async(run())


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration("x"), SystemExit("x"), KeyboardInterrupt("x")])
def test_errors_of_any_kind_are_those_of_the_work(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def run() -> None:
        threads = WorkThreads(num_threads=1)
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError, WorkbenchError)):  # StopIteration is a RuntimeError there
                await threads.run(fail)

    run_async(run())


def test_a_caller_that_leaves_frees_no_place_that_is_in_use() -> None:
    async def run() -> None:
        threads, wakes, began = WorkThreads(num_threads=1), threading.Event(), threading.Event()

        def work() -> None:
            began.set()
            wakes.wait()

        caller = asyncio.create_task(threads.run(work))
        while not began.is_set():
            await asyncio.sleep(0.001)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        other = asyncio.create_task(threads.run(lambda: wakes.is_set()))
        await asyncio.sleep(0)
        wakes.set()
        assert await other  # it began after the work had ended

    run_async(run())
