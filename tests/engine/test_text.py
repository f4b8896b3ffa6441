"""Text through the runner: what is streamed is the text, however a request ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.trace.events import Decoded, Finished

PROMPT = "def read(self, size=-1):\n"


def draft() -> Runner:
    return workbench.load("demo-draft", dtype="float32", backend="eager", pages=24, max_num_batched_tokens=64)


RUNNER = draft()
WHOLE = "".join(event.text for event in RUNNER.stream(PROMPT, max_tokens=40, temperature=0.8, seed=5))


@settings(max_examples=tries(25))
@given(st.integers(0, 90))
def test_cancelling_anywhere_leaves_the_stream_equal_to_the_text(moment: int) -> None:
    streamed, end = "", None
    for number, event in enumerate(RUNNER.stream(PROMPT, max_tokens=40, temperature=0.8, seed=5)):
        if number == moment:
            RUNNER.cancel(event.request_id or next(iter(RUNNER.tracker.sequences), ""))
        streamed += event.text
        end = event if isinstance(event, Finished) else end
    assert end is not None and streamed == end.output_text
    assert WHOLE.startswith(streamed) or end.reason == "cancelled"
    assert RUNNER.scheduler.pages_in_use == 0


@settings(max_examples=tries(25))
@given(st.integers(0, max(0, len(WHOLE) - 3)), st.integers(1, 6))
def test_a_stop_string_ends_the_text_right_before_it(start: int, length: int) -> None:
    stop = WHOLE[start : start + length]
    events = list(RUNNER.stream(PROMPT, max_tokens=40, temperature=0.8, seed=5, stop=stop))
    end = next(event for event in events if isinstance(event, Finished))
    assert end.reason == "stop"
    assert end.output_text == "".join(event.text for event in events) == WHOLE[: WHOLE.index(stop)]


def test_stop_token_ids_end_without_text() -> None:
    chosen = [e.token_id for e in RUNNER.stream(PROMPT, max_tokens=20, temperature=0) if isinstance(e, Decoded)]
    events = list(RUNNER.stream(PROMPT, max_tokens=20, temperature=0, stop_token_ids=[chosen[9]]))
    end = next(event for event in events if isinstance(event, Finished))
    assert end.reason == "stop" and list(end.token_ids) == chosen[: chosen.index(chosen[9]) + 1]
    assert [e.index for e in events if isinstance(e, Decoded)] == list(range(len(end.token_ids)))
