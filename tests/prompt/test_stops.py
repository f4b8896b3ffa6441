"""Stop strings in a text that comes in pieces: against looking for them in all the text, and what that costs."""

from __future__ import annotations

import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.prompt.samples import first_stop, longest_beginning
from workbench.prompt.tokenization.stops import StopStringSearch

LETTERS = st.sampled_from("ab") | st.sampled_from("abc]^-\\\n🙂")
WORDS = st.text(LETTERS, min_size=1, max_size=7)
REPEATED = st.builds(lambda word, times, rest: word * times + rest, WORDS, st.integers(1, 5), WORDS | st.just(""))


PIECES = st.text(LETTERS, max_size=9) | REPEATED


@example(stops=["b", "a"], pieces=["xaby"])  # several end in one piece: the one that starts first, then the shortest
@example(stops=["ab", "a"], pieces=["xabx"])
@given(stops=st.lists(WORDS | REPEATED, max_size=5), pieces=st.lists(PIECES, max_size=12))
def test_against_looking_for_all_of_them_in_all_the_text(stops: list[str], pieces: list[str]) -> None:
    search, shown, text = StopStringSearch(stops), "", ""
    for piece in pieces:
        shown, text = shown + search.push(piece), text + piece
        found = first_stop(text, tuple(stops))
        if found:
            assert (shown, search.matched_stop) == (text[: found[0]], found[1])
            assert search.push("more") == search.finish() == ""
            return
        assert search.matched_stop is None
        assert shown == text[: len(text) - longest_beginning(text, tuple(stops))]
    assert shown + search.finish() == text


def most_memory(stops: list[str], pieces: list[str]) -> int:
    tracemalloc.start()
    try:
        search = StopStringSearch(stops)
        for piece in pieces:
            search.push(piece)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_what_was_met() -> None:
    stops = [chr(0x4E00 + number) * 100_000 for number in range(64)]
    assert most_memory(stops, ["some text", "一" * 10, "丁" * 10] * 10) < 200_000
    assert most_memory(stops, ["一" * 99_999, "x"]) < 3_000_000, "of one stop string, met but for its last character"


def lines_run(stops: list[str], pieces: list[str]) -> int:
    count = 0

    def traced(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        count += event == "line"
        return traced

    before, search = sys.gettrace(), StopStringSearch(stops)
    sys.settrace(traced)
    try:
        for piece in pieces:
            search.push(piece)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("stop", "text"), [("a", "b"), ("a", "a"), ("ab", "ab"), ("aab", "aaa"), ("ab" * 9 + "b", "ab"), ("abaab", "abaab")]
)
def test_work_grows_as_the_text_does(stop: str, text: str) -> None:
    """Counted, not timed: twice the text is at most twice the work, however much of a stop string it repeats."""
    few, many = (lines_run([stop * 600 + "x"], [text[i % len(text)] for i in range(count)]) for count in (1500, 3000))
    assert many <= 2.5 * few + 100
