"""Requests that are wrong, or that break: each ends with its reason, and the others are what they would have been."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.tiny import CONTEXT, VOCAB, every_tensor, finals, layer, model_of, request, runner_of, spec_of
from workbench.engine import naive
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
GREEDY = SamplingParameters(temperature=0, max_tokens=6, ignore_eos=True)


# Bad values for a token id, and for the ids of a prompt: each is refused, none breaks a step.
WRONG_IDS = [None, True, 1.0, "1", b"1", (1,), [], {}, 10**30, float("nan"), np.int64(1), torch.tensor(1)]
NO_IDS = [None, 5, "abc", b"abc", {1, 2}, {1: 2}, range(3), np.array([1, 2]), torch.tensor([1, 2]), iter((1, 2))]


def test_nan_ends_one_request_and_is_scrubbed() -> None:
    requests = [request(f"r{i}", 6, 6) for i in range(3)]
    alone = finals(runner_of(MODEL), requests)
    runner = runner_of(MODEL)
    forward = runner.executor.forward

    def broken(plan):
        rows = forward(plan).clone()
        for index, span in enumerate(s for s in plan.spans if s.needs_sample):
            if span.sequence.request_id == "r1" and len(span.sequence.output_ids) == 2:
                rows[index] = torch.nan
        return rows

    runner.executor.forward = broken  # type: ignore[method-assign]
    held: set[int] = set()
    ends: dict[str, Finished] = {}
    for event in runner.stream(requests):
        held |= {page for s in runner.scheduler.running if s.request_id == "r1" for page in s.pages[0]}
        if isinstance(event, Finished):
            ends[event.request_id] = event
            if event.request_id == "r1":
                assert held and all(tensor[list(held)].eq(0).all() for tensor in runner.store.page_tensors(0))
    assert ends["r1"].reason == "error" and ends["r1"].error and len(ends["r1"].token_ids) == 2
    assert {name: ends[name].token_ids for name in ("r0", "r2")} == {name: alone[name] for name in ("r0", "r2")}


def test_old_contents_of_pages_reach_no_request() -> None:
    clean, poisoned = runner_of(MODEL, pages=6), runner_of(MODEL, pages=6)
    for tensor in every_tensor(clean.store):
        tensor.zero_()
    done = generate(poisoned, [request("next", 9, 9)])
    assert done["next"].reason == "length"
    assert done["next"].token_ids == finals(clean, [request("next", 9, 9)])["next"]


def test_a_nan_weight_ends_those_who_meet_it() -> None:
    """A real NaN, from an embedding row into the cache: its owner ends, its pages are clean, the other goes on."""
    state = {name: value.clone() for name, value in MODEL.state_dict().items()}
    spec = MODEL.spec.model_copy(update={"tie_word_embeddings": False})
    state["head.weight"] = state["embedding.weight"].clone()
    alone = finals(runner_of(Transformer.from_state(spec, dict(state))), [Request("good", (1, 2, 3), GREEDY)])
    state["embedding.weight"][7] = torch.nan
    bad, good = Request("bad", (5, 7, 9), GREEDY), Request("good", (1, 2, 3), GREEDY)
    done = generate(runner_of(Transformer.from_state(spec, dict(state))), [bad, good])
    assert done["bad"].reason == "error"
    assert 7 not in alone["good"] and done["good"].token_ids == alone["good"]
    runner = runner_of(Transformer.from_state(spec, state))
    for tensor in every_tensor(runner.store):
        tensor.zero_()
    assert generate(runner, [bad])["bad"].reason == "error"  # no later request could write over its pages
    assert not any(tensor.isnan().any() for tensor in every_tensor(runner.store))


def test_sampling_is_not_dropped_in_silence() -> None:
    with pytest.raises(WorkbenchError, match="max_tokens: a Request brings its own"):
        runner_of(MODEL).stream(request("a", 3, 3), max_tokens=2)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Request("x", ()), "prompt is empty"),
        (Request("x", (1, VOCAB)), f"token id {VOCAB}, the vocabulary is 0..{VOCAB - 1}"),
        (Request("x", (-1,)), "token id -1"),
        (Request("x", (1.5, 2)), "token id 1.5"),  # type: ignore[arg-type]
        (Request("x", ("a",)), "token id 'a'"),  # type: ignore[arg-type]
        *((Request("x", (1, each)), f"token id {each!r}") for each in WRONG_IDS),  # type: ignore[arg-type]
        *((Request("x", each), f"prompt_ids is of type {type(each).__name__}") for each in NO_IDS),  # type: ignore[arg-type]
        (Request("x", (1,), arrival="soon"), "arrival is soon"),  # type: ignore[arg-type]
        (Request("x", (1,), arrival=float("nan")), "arrival is nan"),
        (Request("a", (1,)), "already taken"),
        (Request("x", (1,) * CONTEXT), "overflow: cut_oldest"),
        (Request("x", (1,), SamplingParameters(stop=("a",))), "stop strings need a tokenizer"),
        (Request("x", (1,), SamplingParameters(stop_token_ids=(99,))), "stop_token_ids has token id 99"),
        (Request("x", (1,), SamplingParameters(logit_bias={99: 1.0})), "99"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_run(bad: Request, words: str) -> None:
    good = [request("a", 4, 5), request("b", 3, 5)]
    alone = finals(runner_of(MODEL), good)
    runner = runner_of(MODEL)
    ends = [event for event in runner.stream([good[0], bad, good[1]]) if isinstance(event, Finished)]
    refused = [event for event in ends if event.reason == "refused"]
    assert [event.request_id for event in refused] == [bad.request_id] and words in refused[0].error
    assert {event.request_id: event.token_ids for event in ends if event.reason != "refused"} == alone
    assert not runner.has_unfinished_requests


def test_cut_oldest_keeps_the_newest_and_says_so() -> None:
    runner = runner_of(MODEL, overflow="cut_oldest")
    long = Request("x", tuple(i % VOCAB for i in range(70)), SamplingParameters(max_tokens=8, temperature=0))
    events = list(runner.stream(long))
    kept = CONTEXT - 8
    assert isinstance(events[0], Submitted) and events[0].cut_tokens == 70 - kept
    short = Request("y", long.prompt_ids[-kept:], long.sampling)
    end = next(event for event in events if isinstance(event, Finished))
    assert end.token_ids == finals(runner, [short])["y"]


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(WorkbenchError, match="no tokenizer"):
        runner_of(MODEL).stream("hello")


def test_logits_of_a_text() -> None:
    ids = [3, 1, 4, 1, 5]
    rows = MODEL.logits(ids)
    assert rows.shape == (5, VOCAB)
    assert torch.allclose(rows, naive.logits(MODEL, torch.tensor(ids)), atol=1e-4)
    for wrong in ([], [VOCAB], [-1], [0] * (CONTEXT + 1), [0.5]):
        with pytest.raises(WorkbenchError):
            MODEL.logits(wrong)  # type: ignore[arg-type]
