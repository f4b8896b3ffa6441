"""Text through the runner: what is streamed is the text, however a request ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from tests.helpers.events import of
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.trace.events import Finished

PROMPT = "def read(self, size=-1):\n"
ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5}


def draft() -> Runner:
    return workbench.load("demo-draft", dtype="float32", backend="eager", pages=24, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return draft()


@pytest.fixture(scope="module")
def whole(runner: Runner) -> Finished:
    """The answer that is cut in the tests."""
    return of(Finished, runner.stream(PROMPT, **ASKED))[0]


@settings(max_examples=tries(25))
@given(st.integers(0, 90))
def test_cancelling_anywhere_leaves_the_stream_equal_to_the_text(runner: Runner, whole: Finished, moment: int) -> None:
    streamed, end = "", None
    for number, event in enumerate(runner.stream(PROMPT, **ASKED)):
        if number == moment:
            runner.cancel(event.request_id or next(iter(runner.tracker.sequences), ""))
        streamed += event.text
        end = event if isinstance(event, Finished) else end
    assert end is not None and streamed == end.output_text
    assert end.token_ids == whole.token_ids[: len(end.token_ids)]
    assert whole.output_text.startswith(streamed.rstrip("\ufffd"))  # a letter that was begun
    assert end.reason == "cancelled" or streamed == whole.output_text
    assert runner.scheduler.pages_in_use == 0


@settings(max_examples=tries(25))
@given(st.integers(0, 999), st.integers(1, 6))
def test_a_stop_string_ends_the_text_right_before_it(runner: Runner, whole: Finished, start: int, length: int) -> None:
    text = whole.output_text
    start %= len(text) - 2
    stop = text[start : start + length]
    events = list(runner.stream(PROMPT, **ASKED, stop=stop))
    end = of(Finished, events)[0]
    assert end.reason == "stop"
    assert end.output_text == "".join(event.text for event in events) == text[: text.index(stop)]
