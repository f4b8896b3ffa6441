"""A request that goes on elsewhere after some of its tokens is the uninterrupted one: tokens, text, end and usage."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests.engine.formats import CONTEXT, FORMATS, runner
from tests.engine.guesses import Guesses, drafts
from tests.engine.resumable import BIAS, KNOWN
from tests.helpers.events import of
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.cluster.fleet_request import resumed_sample
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, Request, SamplingParameters
from workbench.response_format import Choices, Lark, Thinking
from workbench.trace.events import Decoded, Event, Finished, Prefilled, Submitted

CONTROLS = byte_level().special_token_ids
OPENING = CONTROLS["<|think|>"]
CLAIMS = ("reason", "error", "ended_by", "stop_reason", "token_ids", "output_text", "thought_text", "thinking_tokens",
          "prompt_tokens")  # fmt: skip


def free(model_runner: Runner, *asked: Request) -> list[Event]:
    """Run requests beside another, which has nothing to do with them."""
    other = Request("other", (5, 6, 7), SamplingParameters(max_tokens=9, ignore_eos=True, seed=3))
    return [event for event in model_runner.stream([other, *asked]) if event.request_id not in ("", "other")]


def shown(events: list[Event], sample: int = 0) -> list[tuple[int, int, str, str]]:
    return [
        (each.index, each.token_id, each.text, each.channel)
        for each in events
        if isinstance(each, Decoded) and each.sample == sample
    ]


def end_of(events: list[Event], sample: int = 0) -> Finished:
    (end,) = (each for each in events if isinstance(each, Finished) and each.sample == sample)
    return end


def claims(end: Finished) -> dict[str, Any]:
    return {name: getattr(end, name) for name in CLAIMS} | {"text": end.text}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    kind = draw(st.sampled_from(["free", "stops", "grammar", "thought", "thought and grammar"]))
    sampling: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 1.0, 3.0])), "seed": draw(st.integers(0, 999)),
        "max_tokens": draw(st.integers(1, 30)), "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.5])), "top_k": draw(st.sampled_from([0, 20])),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
    }  # fmt: skip
    prompt = list(byte_level().encode("a = " * draw(st.sampled_from([1, 4, 20]))))
    if kind == "stops":
        sampling |= {"stop": ("ab", "ba", "🙂🙂"), "logit_bias": BIAS}
    if "grammar" in kind:
        sampling |= {"response_format": FORMATS[draw(st.sampled_from(sorted(FORMATS)))]}
    if "thought" in kind:
        budget, within = draw(st.integers(0, 12)), draw(st.booleans())
        shows = draw(st.booleans())
        sampling |= {"thinking": Thinking(budget_tokens=budget, within_max_tokens=within, soft_tokens=3, shown=shows)}
        if draw(st.booleans()):
            prompt.append(OPENING)
        else:
            sampling |= {"logit_bias": {OPENING: 100.0} | KNOWN}
    sampling["n"] = draw(st.sampled_from([1, 1, 1, 3]))
    final_only = draw(st.integers(0, 9)) == 0
    parameters = SamplingParameters(**{"logit_bias": KNOWN, **sampling})
    return Request("r", tuple(prompt), parameters, final_only=final_only)


@settings(max_examples=tries(300))
@given(
    asked=requests(), sample=st.integers(0, 2), where=st.floats(0, 1), eos=st.sampled_from([(), (1, 9)]),
    second=st.sampled_from(["warm", "cold", "drafts"]), right=st.floats(0, 1),
)  # fmt: skip
def test_a_resumed_request_is_the_uninterrupted_one(
    asked: Request, sample: int, where: float, eos: tuple[int, ...], second: str, right: float
) -> None:
    """Each sample alone, with an id of its own then and the seed that it had; where its pages are known and where not,
    and with drafts that must match."""
    first, sample = runner(eos, prefix="radix"), sample % asked.sampling.n
    whole = free(first, asked)
    end = end_of(whole, sample)
    assume(end.reason not in ("refused", "error"))
    tokens = shown(whole, sample) if not asked.final_only or asked.sampling.logprobs is not None else None
    cut = round(where * len(end.token_ids))
    ids = end.token_ids[:cut]
    resumed = resumed_sample(asked, sample, ids)
    assert resumed.request_id == (f"r#{sample}" if sample else "r")
    event(f"{end.ended_by}, {'none' if not cut else 'all' if cut == len(end.token_ids) else 'some'}")
    more: dict[str, Any] = {"max_num_batched_tokens": 7, "max_num_seqs": 2}
    if second == "drafts":
        answers = defaultdict(tuple[int, ...], {resumed.request_id: end.token_ids})
        more = {"speculator": drafts(Guesses(answers, cut, right), 4, accept="match")}
        more["speculator"].max_model_len = CONTEXT
    other = first if second == "warm" else runner(eos, **more)
    rest = free(other, resumed)
    assert claims(end_of(rest)) == claims(end)
    assert [*(tokens or [])[:cut], *shown(rest)] == (tokens or [])
    (begun,) = of(Submitted, rest)
    assert (begun.prompt_tokens, begun.generated_tokens) == (len(asked.prompt_ids), cut)
    known = [each.logprob for each in of(Decoded, whole) if each.sample == sample][cut:]
    again = [each.logprob for each in of(Decoded, rest)]
    assert again == pytest.approx(known) if asked.sampling.logprobs is not None else not any(again)
    assert other.scheduler.pages_in_use == 0 and not other.tracker.sequences


def test_a_resumed_request_computes_only_what_no_page_has() -> None:
    asked = Request("r", tuple(byte_level().encode("x = " * 10)), SamplingParameters(max_tokens=20, temperature=0))
    warm = runner(prefix="radix")
    whole = generate(warm, [asked])["r"]
    end = generate(warm, [resumed_sample(asked, 0, whole.token_ids[:12])])["r"]
    assert end.token_ids == whole.token_ids and end.cached_tokens > len(asked.prompt_ids)
    cold = [each for each in runner().stream([resumed_sample(asked, 0, whole.token_ids[:12])])]
    assert sum(each.tokens for each in of(Prefilled, cold)) == len(asked.prompt_ids) + 12


def test_log_probabilities_of_the_prompt_are_not_emitted_again() -> None:
    sampling = SamplingParameters(max_tokens=4, temperature=0, prompt_logprobs=0)
    asked = Request("r", tuple(byte_level().encode("x = ")), sampling)
    whole = generate(runner(), [asked])["r"]
    assert len(whole.prompt_logprobs) == len(asked.prompt_ids)
    rest = free(runner(), resumed_sample(asked, 0, whole.token_ids[:2]))
    assert end_of(rest).token_ids == whole.token_ids
    assert not any(each.logprobs for each in of(Prefilled, rest))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"beams": 2, "n": 2, "temperature": 1.0}, "beams cannot be resumed"),
        ({"best_of": 3}, "best_of > n cannot be resumed"),
        ({"sampler": CustomPart(path="tests.engine.resumable:Counting")}, "Counting cannot be resumed"),
        ({"n": 2}, "resume each sample alone"),
        ({"stop_token_ids": (8,)}, "has tokens after the answer's end (stop_token, 1 tokens)"),
        ({"max_tokens": 1}, "has tokens after the answer's end (max_tokens, 1 tokens)"),
        ({"response_format": Choices(choices=("no",))}, "response_format: token 8"),
        ({"response_format": Lark(lark='start: <|/think|> (<|turn|> "abc")?'), "max_tokens": 3},
         "no complete answer follows token 9 at 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    sampling = SamplingParameters(**changed)
    asked = Request("r", tuple(byte_level().encode("x = ")), sampling)
    alone = runner()
    end = generate(alone, [replace(asked, generated_ids=(8, 9))])["r"]
    assert end.reason == "refused" and words in end.error, end.error
    assert alone.scheduler.pages_in_use == 0 and not alone.tracker.sequences
    if "cannot be resumed" in words:
        with pytest.raises(WorkbenchError, match="cannot be resumed"):
            resumed_sample(asked, 0, (8, 9))
        assert resumed_sample(asked, 0, ()).generated_ids == ()  # from its start it can


def test_after_tokens_that_ended_it_no_step_runs() -> None:
    sampling = SamplingParameters(stop=("é",), max_tokens=9)
    ids = tuple(byte_level().encode("né"))
    steps: deque[Event] = deque()
    alone = runner()
    assert alone.submit(Request("r", (5, 6), sampling, generated_ids=ids), steps) == 1
    end = end_of(list(steps))
    assert (end.reason, end.stop_reason, end.output_text, end.computed_tokens) == ("stop", "é", "n", 0)
    assert not alone.has_unfinished_requests
