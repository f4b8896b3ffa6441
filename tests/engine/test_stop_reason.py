"""The stop that ended a text, against a search for each stop in the tokens of the same request without any."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import layer, model_of, runner_of, spec_of
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.engine.runner import generate
from workbench.request import Request, SamplingParameters
from workbench.speculative.proposers import PromptLookupProposer, Speculator
from workbench.trace.events import Finished

CONTEXT, EOS = 24, (1, 40, 41, 42, 43)
SPEC = spec_of(layer(), eos_token_ids=EOS).model_copy(update={"vocab_size": 266, "max_position_embeddings": CONTEXT})
PLAIN = runner_of(model_of(SPEC, dtype=torch.float64), tokenizer=byte_level())
CHECKING = runner_of(
    model_of(SPEC, dtype=torch.float64),
    tokenizer=byte_level(),
    speculator=Speculator(PromptLookupProposer(1, 2), 3, CONTEXT),
)


def expected(token_ids: tuple[int, ...], prompt: int, asked: SamplingParameters) -> tuple[str, int | str | None, int]:
    """By what a text of `token_ids` ends first, and after how many tokens."""
    tokenizer = byte_level()
    for count, token in enumerate(token_ids, 1):
        if token in EOS and not asked.ignore_eos:
            return "eos", token, count
        if token in asked.stop_token_ids:
            return "stop_token", token, count
        text = b"".join(tokenizer.token_bytes(id) for id in token_ids[:count] if not tokenizer.is_special(id))
        met = [stop for stop in asked.stop if stop.encode() in text]
        found = min(((text.find(stop.encode()), len(stop), stop) for stop in met), default=None)
        if found is not None:
            return "stop_string", found[2], count
        if count == asked.max_tokens:
            return "max_tokens", None, count
        if prompt + count == CONTEXT:
            return "context", None, count
    raise AssertionError("it should have ended")


def one(runner, request: Request) -> Finished:
    return generate(runner, [request])[request.request_id]


@settings(max_examples=tries(60))
@given(
    seed=st.integers(0, 50), prompt=st.integers(1, 16), most=st.integers(1, 30), ignore=st.booleans(),
    stop=st.lists(st.sampled_from([chr(number) for number in range(33, 120)]), max_size=20, unique=True),
    ids=st.lists(st.integers(0, 265), max_size=40), checking=st.booleans(),
)  # fmt: skip
def test_the_stop_that_ended_a_text_is_reported(
    seed: int, prompt: int, most: int, ignore: bool, stop: list[str], ids: list[int], checking: bool
) -> None:
    asked = SamplingParameters(
        max_tokens=most, seed=seed, ignore_eos=ignore, stop=tuple(stop), stop_token_ids=tuple(ids), temperature=1.0
    )
    request = Request("a", tuple(range(50, 50 + prompt)), asked)
    free = SamplingParameters(max_tokens=CONTEXT, seed=seed, ignore_eos=True, temperature=1.0)
    whole = one(PLAIN, replace(request, sampling=free))
    by, which, count = expected(whole.token_ids, prompt, asked)
    end = one(PLAIN, request)
    assert (end.ended_by, end.stop_reason, len(end.token_ids)) == (by, which, count)
    assert end.reason == ("length" if by in ("max_tokens", "context") else "stop")
    if checking:  # another text, for tokens were drafted: its end is its own
        end = one(CHECKING, request)
        free_text = (*end.token_ids, *range(50, 80))
        assert (end.ended_by, end.stop_reason, len(end.token_ids)) == expected(free_text, prompt, asked)


def test_an_end_of_the_model_is_its_end_if_a_caller_names_it_too() -> None:
    """An id that is among the caller's stop tokens as well ends the text as the model's end."""
    both = {"max_tokens": CONTEXT, "temperature": 1.0, "stop_token_ids": tuple(EOS)}
    requests = [Request(str(seed), (50, 51), SamplingParameters(**both, seed=seed)) for seed in range(40)]
    ends = [end.ended_by for end in generate(PLAIN, requests).values()]
    assert "eos" in ends and "stop_token" not in ends


def test_what_did_not_end_by_itself_says_nothing() -> None:
    box = []
    stream = PLAIN.stream([Request("a", (50, 51), SamplingParameters(ignore_eos=True)), Request("b", ())])
    for event in stream:
        if isinstance(event, Finished):
            box.append(event)
            PLAIN.cancel("a")
        elif event.kind == "decoded":
            PLAIN.cancel("a")
    assert sorted((end.request_id, end.reason, end.ended_by, end.stop_reason) for end in box) == [
        ("a", "cancelled", "", None), ("b", "refused", "", None),
    ]  # fmt: skip


def test_beams_and_the_best_of_several_say_it_too() -> None:
    for asked in (
        SamplingParameters(beams=3, n=2, max_tokens=4, stop_token_ids=tuple(range(50, 90))),
        SamplingParameters(best_of=3, n=2, max_tokens=4, stop_token_ids=tuple(range(50, 90))),
    ):
        for end in generate(PLAIN, [Request("a", (50, 51), asked)]).values():
            if end.ended_by in ("eos", "stop_token"):
                assert end.stop_reason == end.token_ids[-1]
            else:
                assert end.ended_by == "max_tokens" and len(end.token_ids) == 4
