"""A constraint of the user's own holds on every way to a token, and one that fails ends its request alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.constrained.own import allowed
from tests.engine.formats import CONTEXT, runner
from tests.engine.guesses import Guesses, drafts
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.cluster.fleet_request import resumed_sample
from workbench.engine.runner import generate
from workbench.request import CustomPart, Request, SamplingParameters
from workbench.response_format import Thinking
from workbench.trace.events import Finished

PROMPT = tuple(byte_level().encode("a = "))
CONTROLS = byte_level().special_token_ids


def ask(walk: int, name: str = "r", kind: str = "Walk", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    part = CustomPart(path=f"tests.constrained.own:{kind}", arguments={"seed": walk})
    return Request(name, prompt, SamplingParameters(constraint=part, **{"max_tokens": 24, **sampling}))


def is_walk(seed: int, ids: tuple[int, ...]) -> bool:
    return all(token in allowed(seed, ids[:place]) for place, token in enumerate(ids))


def claims(end: Finished) -> tuple:
    return end.token_ids, end.reason, end.ended_by, end.output_text, end.error


@settings(max_examples=tries(40))
@given(
    seed=st.integers(0, 999), temperature=st.sampled_from([0.0, 1.0]), right=st.floats(0, 1), where=st.floats(0, 1),
    most=st.integers(1, 24), accept=st.sampled_from(["match", "rejection"]), thinks=st.booleans(),
)  # fmt: skip
def test_no_token_leaves_it_plain_drafted_or_resumed(
    seed: int, temperature: float, right: float, where: float, most: int, accept: str, thinks: bool
) -> None:
    """Drafts that match and a cut change nothing; a thought before it is free."""
    prompt = (*PROMPT, CONTROLS["<|think|>"]) if thinks else PROMPT
    thinking = Thinking(budget_tokens=5) if thinks else None
    asked = ask(seed, prompt=prompt, temperature=temperature, seed=seed, max_tokens=most, thinking=thinking)
    plain = generate(runner((1,)), [asked])["r"]
    assert plain.reason in ("stop", "length"), plain.error

    def answer(end: Finished) -> tuple[int, ...]:
        return end.token_ids[1 + end.thinking_tokens :] if thinks else end.token_ids

    assert answer(plain) and is_walk(seed, answer(plain))
    speculator = drafts(Guesses({"r": plain.token_ids}, seed, right), 4, accept=accept)
    speculator.max_model_len = CONTEXT
    drafted = generate(runner((1,), speculator=speculator, max_num_batched_tokens=7), [asked])["r"]
    assert is_walk(seed, answer(drafted))
    if accept == "match" or temperature == 0:
        assert claims(drafted) == claims(plain)
    resumed = resumed_sample(asked, 0, plain.token_ids[: round(where * len(plain.token_ids))])
    assert claims(generate(runner((1,)), [resumed])["r"]) == claims(plain)


def test_an_answer_that_it_says_is_complete_ends() -> None:
    part = CustomPart(path="tests.constrained.own:Walk", arguments={"seed": 5, "most": 3})
    sampling = SamplingParameters(constraint=part, logit_bias={1: -100.0}, n=2)
    ends = generate(runner((1,)), [Request("r", PROMPT, sampling)])
    assert {(len(end.token_ids), end.reason, end.ended_by) for end in ends.values()} == {(3, "stop", "grammar")}


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("FailsAtThird", "banned: RuntimeError: no more"),
        ("RaggedAtThird", "banned: ValueError: setting an array element"),
        ("ShortAtThird", "banned must return ["),
    ],
)
def test_one_that_fails_in_the_middle_fails_alone(kind: str, fault: str, drafted: bool) -> None:
    """Also where drafts ask it for tokens ahead."""
    good, more = ask(3, "good"), {}
    if drafted:
        guesses = Guesses({"good": (7,) * 24, "bad": (*sorted(allowed(4, ())), 7, 7)}, 0, 1.0)
        more["speculator"] = drafts(guesses, 4, accept="match")
        more["speculator"].max_model_len = CONTEXT
    ours = runner((1,), **more)
    ends = generate(ours, [ask(4, "bad", kind, logit_bias={1: -100.0}), good])
    assert (ends["bad"].reason, len(ends["bad"].token_ids)) == ("error", 2)
    assert ends["bad"].error.startswith(f"constraint tests.constrained.own:{kind}: {fault}")
    assert claims(ends["good"]) == claims(generate(runner((1,)), [good])["good"])
    assert ours.scheduler.pages_in_use == 0


def test_tokens_that_it_forbids_are_not_resumed_after() -> None:
    end = generate(runner((1,)), [resumed_sample(ask(3), 0, (1, 2, 3))])["r"]
    assert end.reason == "refused" and "constraint tests.constrained.own:Walk: forbids token" in end.error
