"""Thoughts before an answer: counted apart, closed at the budget, on a channel of their own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.formats import CONTEXT, RUNNERS, runner
from tests.engine.guesses import Guesses, drafts
from tests.helpers.events import of
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.constrained.thought import ThoughtState, thinking_budget
from workbench.engine.runner import generate
from workbench.request import Request, SamplingParameters
from workbench.response_format import Choices, Thinking
from workbench.trace.events import Decoded, Finished

CONTROLS = byte_level().special_token_ids
OPENING, CLOSING = CONTROLS["<|think|>"], CONTROLS["<|/think|>"]
PROMPT = tuple(byte_level().encode("q: "))


def ask(opened: bool = True, name: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    ids = (*prompt, OPENING) if opened else prompt
    return Request(name, ids, SamplingParameters(**{"temperature": 0, "max_tokens": 8, **sampling}))


def parts(end: Finished, opened: bool) -> tuple[list[int], list[int]]:
    """Return the tokens of the thought and of the answer."""
    ids = list(end.token_ids)
    if not opened:
        if not ids or ids[0] != OPENING:
            return [], ids
        ids = ids[1:]
    if CLOSING not in ids:
        return ids, []
    return ids[: ids.index(CLOSING)], ids[ids.index(CLOSING) + 1 :]


@settings(max_examples=tries(60))
@given(
    budget=st.integers(0, 30),
    soft=st.integers(0, 20),
    most=st.integers(1, 20),
    opened=st.booleans(),
    within=st.booleans(),
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.0, 1.0, 4.0]),
    choices=st.sampled_from([None, ("yes", "no"), ("<|/think|>",)]),
    eager=st.booleans(),
    prompt=st.sampled_from([3, 60, 88]),
)
def test_a_thought_keeps_its_budget_and_leaves_the_answer_its_own(
    budget, soft, most, opened, within, seed, temperature, choices, eager, prompt
) -> None:
    thinking = Thinking(budget_tokens=budget, soft_tokens=soft, within_max_tokens=within)
    form = None if choices is None else Choices(choices=choices)
    asked = ask(
        opened, prompt=PROMPT * (prompt // 3), max_tokens=most, thinking=thinking, seed=seed, temperature=temperature,
        response_format=form, logit_bias={OPENING: 100.0, CONTROLS["<|tool|>"]: 9.0} if eager else {},
    )  # fmt: skip
    end = generate(RUNNERS((1,)), [asked])["r"]
    if end.reason == "refused":
        assert "its shortest answer has" in end.error
        return
    thought, answer = parts(end, opened)
    if choices is None and "out of range" in end.error:  # a free answer has met an id without a token
        return
    assert len(thought) == end.thinking_tokens <= thinking_budget(asked, CONTEXT) <= budget
    assert len(answer) <= most and not {OPENING, CLOSING} & set(answer)
    assert not {*CONTROLS.values()} & set(thought)  # it is text alone
    assert len(end.token_ids) <= (most if within else most + budget + 2)
    assert end.thought_text == byte_level().decode(thought)
    if choices is not None:
        assert end.output_text in choices
    elif end.reason == "length" and not within and CONTEXT - len(asked.prompt_ids) >= most + budget + 2:
        assert len(answer) == most  # the thought took none of its tokens
    shortest = min(len(byte_level().encode(each)) for each in choices) if choices else 1
    if eager and not opened and thinking_budget(asked, CONTEXT, shortest) > 2:
        assert end.token_ids[0] == OPENING


def test_a_sentences_end_near_the_budget_closes() -> None:
    """An end is forced on every token; the thought closes at the first that is near enough, and at no other text."""
    cases = [
        (0, 20, "."),
        (99, 20, ","),
        *((soft, wanted, end) for soft, wanted in ((4, 16), (99, 10)) for end in ".!?\n"),
    ]
    for soft, wanted, text in cases:
        point = byte_level().encode(text)[0]
        thinking = Thinking(budget_tokens=20, soft_tokens=soft)
        end = generate(RUNNERS(()), [ask(thinking=thinking, logit_bias={point: 100.0})])["r"]
        assert end.thinking_tokens == wanted and end.thought_text == text * wanted


def test_events_of_a_thought_have_a_channel_of_their_own() -> None:
    thinking = Thinking(budget_tokens=6)
    form = Choices(choices=("née <|/think|>",))
    events = list(RUNNERS((1,)).stream([ask(max_tokens=30, thinking=thinking, response_format=form)]))
    end = of(Finished, events)[0]
    assert end.output_text == form.choices[0] and end.thinking_tokens == 6
    by_channel = {
        channel: "".join(event.text for event in events if isinstance(event, Decoded) and event.channel == channel)
        for channel in ("thought", "text")
    }
    assert by_channel == {"thought": end.thought_text, "text": end.output_text}
    hidden = generate(
        RUNNERS((1,)), [ask(max_tokens=30, thinking=thinking.model_copy(update={"shown": False}), response_format=form)]
    )["r"]
    assert (hidden.thought_text, hidden.thinking_tokens, hidden.token_ids) == ("", 6, end.token_ids)


def test_a_stop_string_in_a_thought_is_none() -> None:
    end = generate(RUNNERS(()), [ask(thinking=Thinking(budget_tokens=6), stop=tuple("abcdefghijklmnopqrstuvwxyz "))])
    free = generate(RUNNERS(()), [ask(thinking=Thinking(budget_tokens=6))])
    assert end["r"].thought_text == free["r"].thought_text and end["r"].thinking_tokens == 6


@settings(max_examples=tries(10))
@given(seed=st.integers(0, 99), right=st.floats(0, 1), opened=st.booleans())
def test_drafts_and_chunks_change_no_thought(seed: int, right: float, opened: bool) -> None:
    """Also where the closing token, and the answer's first, come within one draft."""
    asked = [
        ask(
            opened, f"r{number}", thinking=Thinking(budget_tokens=number), max_tokens=20,
            response_format=None if number % 2 else Choices(choices=("yesterday", "no")),
            logit_bias={} if opened else {OPENING: 100.0},
        )
        for number in range(6)
    ]  # fmt: skip
    alone = {each.request_id: generate(RUNNERS((1,)), [each])[each.request_id] for each in asked}
    speculator = drafts(Guesses({name: end.token_ids for name, end in alone.items()}, seed, right), 5)
    speculator.max_model_len = CONTEXT
    ends = generate(runner((1,), speculator=speculator, max_num_batched_tokens=16), asked)
    for name, end in ends.items():
        assert (end.token_ids, end.thought_text, end.output_text, end.reason) == (
            alone[name].token_ids, alone[name].thought_text, alone[name].output_text, alone[name].reason,
        )  # fmt: skip


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("most", [3, 6, 40])
def test_a_grammar_begins_behind_a_thought_that_the_prompt_opens(opened: bool, most: int) -> None:
    """Also where nothing is asked of thoughts: the closing token was none of the grammar's, and the thought was it."""
    form = Choices(choices=("y",))
    end = generate(RUNNERS((1,)), [ask(opened, max_tokens=most, response_format=form, logit_bias={CLOSING: -99.0})])[
        "r"
    ]
    thought, answer = parts(end, opened)
    assert byte_level().decode(answer) == end.output_text == "y"
    assert end.thinking_tokens == len(thought) == (max(0, most - 3) if opened else 0)


def test_a_token_that_is_not_there_is_named() -> None:
    end = generate(RUNNERS(()), [ask(thinking=Thinking(budget_tokens=3, closing="</thought>"))])["r"]
    assert end.reason == "refused" and "'</thought>' is not a single token of this model" in end.error


@pytest.mark.parametrize("kept", ["open", "closed", "none"])
def test_the_prompt_says_whether_a_thought_is_open(kept: str) -> None:
    ids = {"open": (5, OPENING, 6), "closed": (OPENING, 5, CLOSING), "none": (5,)}[kept]
    request = Request("r", ids, SamplingParameters(thinking=Thinking(budget_tokens=2)))
    assert ThoughtState.start(request, byte_level(), 2).phase == ("open" if kept == "open" else "before")
