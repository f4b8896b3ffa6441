"""One thread owns a runner: each caller gets what it would have got alone, and none is in the way of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.helpers.events import of
from tests.patience import until
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished


@pytest.fixture(scope="module")
def demo() -> Runner:
    return load("demo", backend="eager", prefix="radix")


@pytest.fixture
def runner(demo: Runner) -> Iterator[Runner]:
    demo.owner = None
    yield demo
    RunnerThread.attach(demo).stop()
    assert RunnerThread.attach(demo).call(lambda runner: sum(pool.num_used for pool in runner.scheduler.pools)) == 0
    demo.owner, demo.telemetry.listener = None, None


@pytest.fixture
def owner(runner: Runner) -> RunnerThread:
    return RunnerThread.attach(runner)


def finished(events: list[Event]) -> Finished:
    (end,) = of(Finished, events)
    return end


def test_what_is_asked_is_what_the_runner_gives(runner: Runner) -> None:
    alone = [e.token_id for e in of(Decoded, runner.stream("def f(x):", max_tokens=12))]
    owner = RunnerThread.attach(runner)
    first, second = (owner.submit(text, max_tokens=12) for text in ("def f(x):", "class A:"))
    assert [e.token_id for e in of(Decoded, first)] == alone
    assert second.wait() and len(finished(second.events).token_ids) == 12


def test_a_cell_streams_through_the_owner(runner: Runner, owner: RunnerThread) -> None:
    other = owner.submit("class A:", max_tokens=900)
    text = "".join(event.text for event in runner.stream("def f(x):", max_tokens=8))
    assert text and not other.done
    other.stop()
    assert other.wait() and finished(other.events).reason == "cancelled"


def test_while_it_works_no_other_thread_steps(runner: Runner, owner: RunnerThread) -> None:
    asked = owner.submit("class A:", max_tokens=900)
    until(lambda: asked.events)
    with pytest.raises(WorkbenchError, match="another thread owns this runner"):
        runner.step()
    names = owner.call(lambda r: list(r.tracker.sequences))
    assert len(names) == 1
    asked.stop()
    assert asked.wait()


def test_cached_tokens_are_known_while_it_works_and_after(runner: Runner, owner: RunnerThread) -> None:
    ids = tuple(range(5, 5 + 3 * runner.config.cache.page_size))
    first = Request("first", ids, SamplingParameters(max_tokens=2), cache_salt="alice")
    assert owner.submit(first).wait()
    alone = runner.cached_tokens(ids, "alice")
    assert alone > runner.cached_tokens(ids) == runner.cached_tokens(ids, "bob") == 0
    asked = owner.submit("class A:", max_tokens=900)
    until(lambda: asked.events)
    assert runner.cached_tokens(ids, "alice") == alone and runner.cached_tokens(ids) == 0
    asked.stop()
    assert asked.wait()


def test_an_end_that_is_read_leaves_the_runner_to_its_reader(runner: Runner, owner: RunnerThread) -> None:
    for _ in range(30):
        assert of(Finished, runner.stream("class A:", max_tokens=1))
        runner.step()


def seen_by_others(owner: RunnerThread) -> bool:
    """Return whether the runner's thread is at work, in the view of another thread."""
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(owner.is_other_thread()))
    other.start()
    other.join()
    return found[0]


@pytest.mark.parametrize("max_tokens", [1, 900])
def test_an_end_or_a_result_that_is_handed_out_leaves_the_runner_free(owner: RunnerThread, max_tokens: int) -> None:
    seen = list[bool]()

    class Sink:
        def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
            if done:
                seen.append(seen_by_others(owner))

    cancel = owner.submit_to(Sink(), [Request("asked", (5, 6, 7), SamplingParameters(max_tokens=max_tokens))])
    if max_tokens > 1:
        cancel()
    until(lambda: seen)
    answer = owner.submit_call(lambda _: None)
    answer.add_done_callback(lambda _: seen.append(seen_by_others(owner)))
    until(lambda: len(seen) == 2)
    assert seen == [False, False]


def test_a_call_within_a_call_or_a_step_does_not_give_the_runner_away(owner: RunnerThread) -> None:
    seen = list[bool]()

    def outer(_: Runner) -> None:
        owner.call(lambda _: None)
        seen.append(seen_by_others(owner))

    owner.call(outer)
    asked = owner.submit("class A:", max_tokens=900)

    def stop_within_a_step(event: Event) -> None:
        if isinstance(event, Decoded) and not asked.done:
            asked.stop()
            seen.append(seen_by_others(owner))

    leave = owner.listen(stop_within_a_step)
    assert asked.wait()
    owner.call(lambda _: None)  # that step is over
    leave()
    assert seen == [True, True]


def test_requests_that_a_reader_submits_itself_are_its_own_to_step(runner: Runner, owner: RunnerThread) -> None:
    runner.submit(Request("mine", (5, 6, 7), SamplingParameters(max_tokens=3)))
    before = runner.scheduler.next_step
    for _ in range(2):  # the second is answered when the turn of the first is over
        owner.call(lambda _: None)
    assert runner.scheduler.next_step == before
    runner.step()
    assert runner.scheduler.next_step == before + 1
    runner.cancel("mine")


def test_leaving_the_loop_ends_the_requests(owner: RunnerThread) -> None:
    asked = owner.submit("class A:", max_tokens=900)
    for event in asked:
        if isinstance(event, Decoded):
            break
    assert asked.wait() and finished(asked.events).reason == "cancelled"


def test_a_refused_request_raises_where_it_is_read_and_harms_no_other(owner: RunnerThread) -> None:
    good = owner.submit("class A:", max_tokens=6)
    bad = owner.submit("", max_tokens=6)
    with pytest.raises(WorkbenchError, match="the prompt is empty"):
        list(bad)
    assert good.wait() and finished(good.events).reason == "length"


def test_a_fault_of_the_runner_reaches_all_callers_and_ends_with_them(runner: Runner, owner: RunnerThread) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    step = runner.step
    runner.step = broken  # type: ignore[method-assign]
    try:
        asked = owner.submit("class A:", max_tokens=6)
        with pytest.raises(WorkbenchError, match="out of order"):
            list(asked)
    finally:
        runner.step = step  # type: ignore[method-assign]
    assert owner.submit("class A:", max_tokens=3).wait()


def test_later_arrivals_come_when_they_are_due(owner: RunnerThread) -> None:
    few = SamplingParameters(max_tokens=3)
    asked = owner.submit([Request("late", (5, 6, 7), few, arrival=0.2), Request("now", (5, 6, 7), few)])
    assert asked.wait()
    assert [e.request_id for e in of(Finished, asked.events)] == ["now", "late"]


def test_errors_of_a_call_come_out_and_the_thread_ends_when_all_is_done(runner: Runner, owner: RunnerThread) -> None:
    with pytest.raises(WorkbenchError, match="is not being served"):
        owner.call(lambda r: r.inspect("unknown"))
    assert owner.submit("class A:", max_tokens=2).wait()
    until(lambda: not [t for t in threading.enumerate() if t.name == "runner's owner"])
    assert not owner.is_other_thread()
    runner.step()  # no other thread is in the way


def test_requests_in_a_row_share_one_thread_and_its_pool(runner: Runner, owner: RunnerThread) -> None:
    asked = owner
    threads = []
    for _ in range(3):
        assert asked.submit("class A:", max_tokens=1).wait()
        threads.append(asked.call(lambda _: threading.get_ident()))
        runner.step()  # a thread that only lingers is in no caller's way, from the moment on at which a result is there
    assert len(set(threads)) == 1


def test_listeners_hear_everything_until_they_leave(owner: RunnerThread) -> None:
    heard: list[Event] = []
    leave = owner.listen(heard.append)
    asked = owner.submit("class A:", max_tokens=4)
    assert asked.wait()
    assert {event.kind for event in heard} >= {
        "submitted",
        "step_planned",
        "prefilled",
        "decoded",
        "stepped",
        "finished",
    }
    leave()
    count = len(heard)
    assert owner.submit("class A:", max_tokens=4).wait() and len(heard) == count


def test_a_job_that_fails_ends_what_was_asked_and_the_next_is_served(runner: Runner, owner: RunnerThread) -> None:
    came = threading.Event()

    def broken(*_: object) -> None:
        came.set()
        raise RuntimeError("no clock")

    clock = runner.clock
    runner.clock = broken  # type: ignore[assignment]
    asked = owner.submit("class A:", max_tokens=3)
    try:
        came.wait()
    finally:
        runner.clock = clock
    with pytest.raises(WorkbenchError, match="no clock"):
        list(asked)
    again = owner.submit("class A:", max_tokens=3)
    assert again.wait() and finished(again.events).reason == "length"


def test_the_stop_button_reaches_what_goes_on(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython", reason="pip install 'inference-workbench[lab]'")
    kernel = SimpleNamespace(saved_sigint_handler=lambda *_: None)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=kernel))
    runner.owner = None
    asked = RunnerThread.attach(runner).submit("class A:", max_tokens=900)
    until(lambda: asked.events)  # it goes on: what is stopped before it begins has no end
    kernel.saved_sigint_handler(2, None)
    assert asked.wait() and finished(asked.events).reason == "cancelled"
