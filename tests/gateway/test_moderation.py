"""Moderation: of what leaves, no character belongs to a match, whatever the cuts of the stream."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import workbench
from tests.event_loop import run_async
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.gateway.moderation import AnswerFilter, CheckFailed, Moderation, ModerationConfig
from workbench.gateway.streamed_rules import fold
from workbench.request import CustomPart
from workbench.serve.answers.pieces import Ended, Piece, Text, Thought, TokenLogprob, ToolArguments, ToolCallBegun, Used

TEXTS = st.text("abc B_é. \n", max_size=60)
TERMS = st.lists(st.text("abcB.é ", min_size=1, max_size=5), min_size=1, max_size=4)
REGEXES = st.sampled_from([r"ab?c", r"(a|b){2,4}c", r"\bab\b", r"c$", r"[ab]\.\s?c", r"a\b.", r"a\B.", r"(?i)BC{1,3}"])
CUTS = st.lists(st.integers(1, 7), max_size=60)


def moderation(*rules: dict[str, Any], **values: Any) -> Moderation:
    named = [{"name": f"rule{number}", **each} for number, each in enumerate(rules)]
    return Moderation(ModerationConfig.model_validate({"rules": named, **values}))


def take(answer: AnswerFilter, pieces: Sequence[Piece]) -> list[Piece]:
    return run_async(answer.take(pieces))


def found_in(rules: Moderation, texts: Sequence[str]) -> str:
    return run_async(rules.find_in_prompt(texts))


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def streamed(rules: Moderation, parts: Sequence[str]) -> tuple[str, str, int]:
    """Return what left, how it ended, and the largest number of characters held back."""
    return run_async(_streamed(rules, parts))


async def _streamed(rules: Moderation, parts: Sequence[str]) -> tuple[str, str, int]:
    answer = rules.answer_filter(1)
    left, came, held = "", 0, 0
    ended: list[Ended] = []
    for piece in [*(Text(text=each, token_ids=(1,)) for each in parts), Ended(), Used()]:
        out = await answer.take([piece])
        left += "".join(each.text for each in out if isinstance(each, Text))
        ended += [each for each in out if isinstance(each, Ended)]
        came += len(piece.text) if isinstance(piece, Text) else 0
        held = held if ended else max(held, came - len(left))
    (end,) = ended
    return left, end.reason, held


def first_match(patterns: Sequence[re.Pattern[str]], text: str) -> int | None:
    return min((found.start() for each in patterns if (found := each.search(text))), default=None)


@settings(max_examples=tries(250), deadline=None)
@given(text=TEXTS, terms=TERMS, whole=st.booleans(), cuts=CUTS)
@example(text="abcab ab", terms=["ab"], whole=True, cuts=[1, 1, 1])
def test_terms_are_found_whatever_the_cuts(text: str, terms: list[str], whole: bool, cuts: list[int]) -> None:
    rules = moderation({"terms": terms, "whole_words": whole})
    folded = "".join(map(fold, text))
    sources = [re.escape("".join(map(fold, each))) for each in terms]
    if whole:  # a boundary where a letter or digit of the term is at its edge
        sources = [
            (r"(?<!\w)" if re.match(r"\w", each) else "") + source + (r"(?!\w)" if re.search(r"\w$", each) else "")
            for each, source in zip(terms, sources, strict=True)
        ]
    first = first_match([re.compile(each) for each in sources], folded)
    left, reason, held = streamed(rules, cut(text, cuts))
    assert reason == ("stop" if first is None else "content_filter")
    assert text.startswith(left)
    if first is None:
        assert left == text
    elif whole:
        assert len(left) <= max(first, 0) or first_match([re.compile(each) for each in sources], left) is None
    else:
        assert first_match([re.compile(each) for each in sources], left.lower()) is None
    assert held <= max(map(len, terms)) - (0 if whole else 1)


@settings(max_examples=tries(250), deadline=None)
@given(text=TEXTS, regexes=st.lists(REGEXES, min_size=1, max_size=2), cuts=CUTS)
@example(text="cab", regexes=[r"\bab\b"], cuts=[1, 1])
@example(text="ab", regexes=[r"a\B."], cuts=[1])
def test_no_character_of_a_match_leaves(text: str, regexes: list[str], cuts: list[int]) -> None:
    rules = moderation(*({"regex": each} for each in regexes))
    first = first_match([re.compile(each) for each in regexes], text)
    left, reason, held = streamed(rules, cut(text, cuts))
    assert reason == ("stop" if first is None else "content_filter")
    assert text.startswith(left)
    matches = [found for each in regexes for found in re.finditer(each, text)]
    assert all(len(left) <= found.start() or len(left) >= found.end() for found in matches)
    assert left == text if first is None else len(left) <= min(found.start() for found in matches)
    assert held <= 12


@settings(max_examples=tries(60), deadline=None)
@given(text=st.text("ab ", max_size=80), cuts=CUTS)
@example(text="a" + "b" * 40, cuts=[1] * 40)
def test_a_regex_without_a_longest_match_holds_back_a_stated_number(text: str, cuts: list[int]) -> None:
    left, reason, held = streamed(moderation({"regex": "ab*a"}, max_match_characters=5), cut(text, cuts))
    assert (reason == "content_filter") == bool(re.search("ab*a", text)) or re.search("ab{4,}a", text)
    assert re.search("ab{0,3}a", left) is None and held <= 5 + 6  # a piece has up to 7 characters


def test_what_is_held_back_is_no_more_than_may_match() -> None:
    answer = moderation({"terms": ["bad idea"]}).answer_filter(1)
    parts = ["a b", "a", "ba", "d ", "a bad", " ide", "a", "l"]
    shown = ["".join(each.text for each in take(answer, [Text(text=part)]) if isinstance(each, Text)) for part in parts]
    assert shown == ["a ", "", "baba", "d ", "a ", "", "", "bad ideal"]


def test_channels_and_choices_are_apart_and_a_stop_ends_all() -> None:
    answer = moderation({"terms": ["secret"]}).answer_filter(2)
    out = take(answer, [Text(0, text="sec"), Text(1, text="fine"), Thought(1, text="x"), Text(0, text="ond. ")])
    assert "".join(each.text for each in out if isinstance(each, Text)) == "finesecond. "
    begun = ToolCallBegun(0, 0, "id", "look")
    out = take(answer, [begun, ToolArguments(0, 0, '{"a": "the SECRET"}'), Text(0, text="no")])
    assert out == [
        begun,
        ToolArguments(0, 0, '{"a": "the '),
        Ended(0, "content_filter"),
        Ended(1, "content_filter"),
    ]
    assert answer.stopped_by == "rule0"
    assert take(answer, [Text(1, text="more"), Ended(1), Used(completion_tokens=3)]) == [Used(completion_tokens=3)]


def test_tokens_leave_with_the_last_character_of_their_piece() -> None:
    answer = moderation({"terms": ["bad"]}).answer_filter(1)
    (first,) = take(
        answer, [Text(text="no b", token_ids=(7, 8), logprobs=(TokenLogprob(7, 0.0), TokenLogprob(8, 0.0)))]
    )
    assert first == Text(text="no ")
    rest = take(answer, [Text(text="all", token_ids=(9,))])
    assert rest == [
        Text(text="b", token_ids=(7, 8), logprobs=(TokenLogprob(7, 0.0), TokenLogprob(8, 0.0))),
        Text(text="all", token_ids=(9,)),
    ]


def test_a_match_over_an_interruption_never_completes() -> None:
    answer = moderation({"terms": ["secret"], "whole_words": False}).answer_filter(1)
    out = take(answer, [Text(text="a sec"), ToolCallBegun(0, 0, "id", "look"), Text(text="ret"), Ended(), Used()])
    assert [each for each in out if isinstance(each, Text)] == [Text(text="a "), Text(text="sec")]
    assert Ended(0, "content_filter") in out


def test_a_classifier_sees_a_text_before_it_leaves() -> None:
    seen: list[str] = []

    @workbench.register("test-classifier")
    def classify(text: str) -> str:
        seen.append(text)
        return "shouting" if "!!" in text else ""

    config = ModerationConfig(classifier=CustomPart(path="test-classifier"), window_characters=4)
    rules = Moderation(config)
    assert found_in(rules, ["fine", "no!!"]) == "shouting"
    left, reason, held = streamed(rules, ["ab", "cd", "e", "f!", "!", "gone"])
    assert (left, reason) == ("abcd", "content_filter") and held <= 4
    assert streamed(rules, ["ab", "c"])[:2] == ("abc", "stop")
    assert any(each == "abc" for each in seen)
    for way, refused in (("input", True), ("output", False)):
        one = Moderation(config.model_copy(update={"classifier_on": (way,)}))
        assert bool(found_in(one, ["no!!"])) == one.moderates("input") == refused != one.moderates("output")


@pytest.mark.parametrize("on_failure", ["closed", "open"])
@pytest.mark.parametrize("word", ["fail", "hang"])
def test_a_classifier_that_fails_or_hangs_stops_that_text_or_lets_it_pass(word: str, on_failure: Any) -> None:
    wakes = threading.Event()

    @workbench.register("test-hanging-classifier")
    def classify(text: str) -> str:
        if "hang" in text:
            wakes.wait()
        if "fail" in text:
            raise SystemExit("no classifier today")
        return ""

    part = CustomPart(path="test-hanging-classifier")
    rules = Moderation(ModerationConfig(classifier=part, window_characters=4, seconds=0.2, on_failure=on_failure))
    if on_failure == "closed":
        with pytest.raises(CheckFailed):
            found_in(rules, [word])
        left, reason, _ = streamed(rules, ["good", word, "more"])
        assert (left, reason) == ("good", "content_filter")
    else:
        assert found_in(rules, [word]) == ""
        assert streamed(rules, ["good", word, "more"])[:2] == (f"good{word}more", "stop")
    assert found_in(Moderation(ModerationConfig(classifier=part)), ["good"]) == ""
    wakes.set()


@pytest.mark.parametrize(
    ("regex", "said"),
    [
        ("a(", "not a regular expression"),
        ("a*", "matches the empty text"),
        ("a(?=b)", "looks ahead"),
        ("(?<!a)b", "behind"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(regex: str, said: str) -> None:
    with pytest.raises(WorkbenchError, match=said):
        moderation({"regex": regex})
