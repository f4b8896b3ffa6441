"""The runner against the oracle, and what happens to requests that end early or badly."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import CONTEXT, VOCAB, Oracle, layer, model_of, poison, runner_of, spec_of, specs
from workbench.engine import naive
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished, SetBack, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, window=5)))


def request(name: str, prompt: int, most: int, **sampling) -> Request:
    ids = tuple(random.Random(name).randrange(VOCAB) for _ in range(prompt))
    return Request(name, ids, SamplingParameters(max_tokens=most, ignore_eos=True, **{"temperature": 0, **sampling}))


def finals(runner, requests) -> dict[str, tuple[int, ...]]:
    return {name: event.token_ids for name, event in generate(runner, requests).items()}


jobs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=40)
@given(specs, st.integers(0, 99), jobs, st.integers(1, 24), st.integers(1, 4), st.integers(1, 7), st.randoms())
def test_every_row_is_the_oracles(
    spec: ModelSpec, seed: int, sizes: list, budget: int, seqs: int, page_size: int, shuffle: random.Random
) -> None:
    """Random models, prompts, budgets, page sizes, page orders and orders of arrival."""
    pages = -(-29 // page_size) + shuffle.randrange(12)
    order = shuffle.sample(range(1, pages + 1), pages)
    runner = runner_of(
        model_of(spec, seed), max_num_seqs=seqs, max_num_batched_tokens=budget, page_size=page_size, pages=pages,
        page_order=order,
    )  # fmt: skip
    oracle = Oracle(runner)
    requests = [request(f"r{i}", prompt, most) for i, (prompt, most) in enumerate(sizes)]
    shuffle.shuffle(requests)
    done = generate(runner, requests)
    assert {name: len(event.token_ids) for name, event in done.items()} == {
        r.request_id: r.sampling.max_tokens for r in requests
    }
    assert oracle.clear
    assert runner.scheduler.pages_used == 0


def test_the_oracle_can_object() -> None:
    runner = runner_of(MODEL)
    Oracle(runner)
    forward = runner.executor.inner.forward  # type: ignore[attr-defined]
    runner.executor.inner.forward = lambda plan: forward(plan) + 0.01  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        generate(runner, [request("a", 5, 3)])


def test_greedy_is_the_naive_loop() -> None:
    asked = request("a", 7, 12)
    tokens = finals(runner_of(MODEL), [asked])["a"]
    assert list(tokens) == naive.greedy(MODEL, list(asked.prompt_ids), 12)


def test_set_back_changes_nothing() -> None:
    requests = [request(f"r{i}", 9, 14, temperature=0.9, seed=i) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    scarce = runner_of(MODEL, pages=9)
    events = list(scarce.stream(requests))
    assert any(isinstance(event, SetBack) for event in events)
    assert {e.request_id: e.token_ids for e in events if isinstance(e, Finished)} == roomy


@given(st.integers(0, 40), st.integers(0, 3), st.data())
@settings(max_examples=40)
def test_cancelling_at_any_event_frees_its_pages(moment: int, which: int, data: st.DataObject) -> None:
    requests = [request(f"r{i}", 6 + i, 8) for i in range(4)]
    alone = finals(runner_of(MODEL), requests)
    runner = runner_of(MODEL, pages=20)
    events: list[Event] = []
    for number, event in enumerate(runner.stream(requests)):
        if number == moment:
            runner.cancel(f"r{which}")
            held = [s for s in (*runner.scheduler.running, *runner.scheduler.waiting) if s.request_id == f"r{which}"]
            assert not held
            assert runner.scheduler.pages_used == sum(len(p) for s in runner.scheduler.running for p in s.pages)
        events.append(event)
    ends = [e for e in events if isinstance(e, Finished)]
    assert sorted(e.request_id for e in ends) == [f"r{i}" for i in range(4)], "one end each"
    for end in ends:
        if end.reason != "cancelled":
            assert end.token_ids == alone[end.request_id]
    assert runner.scheduler.pages_used == 0


def test_closing_the_stream_cancels_the_rest() -> None:
    runner = runner_of(MODEL)
    stream = runner.stream([request("a", 5, 30), request("b", 5, 30)])
    for event in stream:
        if isinstance(event, Decoded):
            break
    stream.close()  # type: ignore[attr-defined]
    assert not runner.busy and runner.scheduler.pages_used == 0


def test_nan_ends_one_request_and_is_scrubbed() -> None:
    requests = [request(f"r{i}", 6, 6) for i in range(3)]
    alone = finals(runner_of(MODEL), requests)
    runner = runner_of(MODEL)
    forward = runner.executor.forward

    def broken(plan):
        rows = forward(plan).clone()
        for index, span in enumerate(s for s in plan.spans if s.samples):
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
                assert held and all(runner.store.layers[0].keys[page].eq(0).all() for page in held)
    assert ends["r1"].reason == "error" and "r1" not in ends["r1"].token_ids
    assert ends["r1"].error and len(ends["r1"].token_ids) == 2
    assert {name: ends[name].token_ids for name in ("r0", "r2")} == {name: alone[name] for name in ("r0", "r2")}


def test_a_nan_in_the_cache_reaches_nobody_else() -> None:
    """A poisoned owner leaves, and the next owner of its pages computes as if they were new."""
    runner = runner_of(MODEL, pages=6, max_num_seqs=1)
    expected = finals(runner_of(MODEL), [request("next", 9, 9)])
    poison(runner)
    assert finals(runner, [request("next", 9, 9)]) == expected


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Request("x", ()), "prompt is empty"),
        (Request("x", (1, VOCAB)), f"token id {VOCAB}, the vocabulary is 0..{VOCAB - 1}"),
        (Request("x", (-1,)), "token id -1"),
        (Request("x", (1,) * CONTEXT), "overflow: cut_oldest"),
        (Request("x", (1,), SamplingParameters(stop="a")), "stop strings need a tokenizer"),
        (Request("x", (1,), SamplingParameters(stop_token_ids=(99,))), "stop_token_ids has token id 99"),
        (Request("x", (1,), SamplingParameters(logit_bias={99: 1.0})), "99"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_run(bad: Request, words: str) -> None:
    good = [request("a", 4, 5), request("b", 3, 5)]
    alone = finals(runner_of(MODEL), good)
    runner = runner_of(MODEL)
    done = generate(runner, [good[0], bad, good[1]])
    assert done["x"].reason == "refused" and words in done["x"].error
    assert {name: done[name].token_ids for name in alone} == alone


def test_cut_oldest_keeps_the_newest_and_says_so() -> None:
    runner = runner_of(MODEL, overflow="cut_oldest")
    long = Request("x", tuple(i % VOCAB for i in range(70)), SamplingParameters(max_tokens=8, temperature=0))
    events = list(runner.stream(long))
    kept = CONTEXT - 8
    assert isinstance(events[0], Submitted) and events[0].cut_tokens == 70 - kept
    short = Request("y", long.prompt_ids[-kept:], long.sampling)
    end = next(event for event in events if isinstance(event, Finished))
    assert end.token_ids == finals(runner, [short])["y"]


def test_the_context_is_the_last_limit() -> None:
    done = generate(runner_of(MODEL), [request("a", CONTEXT - 3, 50)])
    assert done["a"].reason == "length" and len(done["a"].token_ids) == 3


def test_end_tokens_and_their_being_ignored() -> None:
    tokens = finals(runner_of(MODEL), [request("a", 6, 10)])["a"]
    ending = model_of(spec_of(layer(4, 2), layer(4, 2, window=5), end_ids=(tokens[4],)))
    asked = Request("a", request("a", 6, 10).prompt_ids, SamplingParameters(temperature=0, max_tokens=10))
    done = generate(runner_of(ending), [asked])["a"]
    first = tokens.index(tokens[4])
    assert done.reason == "stop" and done.token_ids == tokens[: first + 1]
    assert finals(runner_of(ending), [request("a", 6, 10)])["a"] == tokens


def test_one_id_runs_once_at_a_time() -> None:
    runner = runner_of(MODEL)
    runner.submit(request("a", 4, 4))
    with pytest.raises(WorkbenchError, match="already taken"):
        runner.submit(request("a", 4, 4))
    with pytest.raises(WorkbenchError, match="'b' is already taken"):
        runner.stream([request("b", 4, 4), request("c", 4, 4), request("b", 3, 4)])


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
