"""The runner against the oracle, and what happens to requests that end early or badly."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import CONTEXT, VOCAB, Objection, Oracle, layer, model_of, runner_of, spec_of, specs
from workbench.engine import naive
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished, SetBack, Stepped, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, window=5)))
MODEL_BYTES = 2 * 2 * 2 * 4 * 4  # a token: layers, keys and values, groups, dim, bytes
GREEDY = SamplingParameters(temperature=0, max_tokens=6, ignore_eos=True)


def request(name: str, prompt: int, most: int, **sampling) -> Request:
    draw = random.Random(name)
    ids = tuple(draw.randrange(VOCAB) for _ in range(prompt))
    return Request(name, ids, SamplingParameters(max_tokens=most, ignore_eos=True, **{"temperature": 0, **sampling}))


def finals(runner, requests) -> dict[str, tuple[int, ...]]:
    return {name: event.token_ids for name, event in generate(runner, requests).items()}


jobs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=5)


DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64])


@settings(max_examples=50)
@given(specs, DTYPES, jobs, st.integers(1, 24), st.integers(1, 4), st.integers(1, 7), st.randoms())
def test_every_row_is_the_oracles(
    spec: ModelSpec, dtype: torch.dtype, sizes: list, budget: int, seqs: int, page_size: int, shuffle: random.Random
) -> None:
    """Random models, precisions, prompts, budgets, page sizes, page orders and orders of arrival."""
    pages = -(-29 // page_size) + shuffle.randrange(12)
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in spec.layer_groups)
    runner = runner_of(
        model_of(spec, shuffle.randrange(99), dtype=dtype), max_num_seqs=seqs, max_num_batched_tokens=budget,
        page_size=page_size, pages=pages, page_orders=orders,
    )  # fmt: skip
    oracle = Oracle(runner)
    requests = [request(f"r{i}", prompt, most) for i, (prompt, most) in enumerate(sizes)]
    shuffle.shuffle(requests)
    arrivals = [replace(r, arrival=shuffle.choice([0.0, 0.0, 0.002])) for r in requests]
    done = generate(runner, arrivals)
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
    with pytest.raises(Objection):
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
    assert ends["r1"].reason == "error" and ends["r1"].error and len(ends["r1"].token_ids) == 2
    assert {name: ends[name].token_ids for name in ("r0", "r2")} == {name: alone[name] for name in ("r0", "r2")}


def test_what_pages_held_before_reaches_nobody() -> None:
    clean, poisoned = runner_of(MODEL, pages=6), runner_of(MODEL, pages=6)
    for cache in clean.store.layers:
        cache.keys.zero_()
        cache.values.zero_()
    done = generate(poisoned, [request("next", 9, 9)])
    assert done["next"].reason == "length"
    assert done["next"].token_ids == finals(clean, [request("next", 9, 9)])["next"]


def test_a_nan_weight_ends_those_who_meet_it() -> None:
    """A real NaN, from an embedding row into the cache: its owner ends, its pages are clean, the other goes on."""
    state = {name: value.clone() for name, value in MODEL.state_dict().items()}
    spec = MODEL.spec.model_copy(update={"tied": False})
    state["head.weight"] = state["embedding.weight"].clone()
    alone = finals(runner_of(Transformer.from_state(spec, dict(state))), [Request("good", (1, 2, 3), GREEDY)])
    state["embedding.weight"][7] = torch.nan
    bad, good = Request("bad", (5, 7, 9), GREEDY), Request("good", (1, 2, 3), GREEDY)
    done = generate(runner_of(Transformer.from_state(spec, dict(state))), [bad, good])
    assert done["bad"].reason == "error"
    assert 7 not in alone["good"] and done["good"].token_ids == alone["good"]
    runner = runner_of(Transformer.from_state(spec, state))
    for cache in runner.store.layers:
        cache.keys.zero_()
        cache.values.zero_()
    assert generate(runner, [bad])["bad"].reason == "error"  # nobody follows who could write over its pages
    assert not any(cache.keys.isnan().any() or cache.values.isnan().any() for cache in runner.store.layers)


def test_a_step_that_raises_ends_its_requests_only() -> None:
    runner = runner_of(MODEL, max_num_seqs=1)
    forward = runner.executor.forward

    def failing(plan):
        if plan.spans[0].sequence.request_id == "a" and plan.step == 2:
            raise MemoryError("no room")
        return forward(plan)

    runner.executor.forward = failing  # type: ignore[method-assign]
    done = generate(runner, [request("a", 4, 6), request("b", 4, 6)])
    assert done["a"].reason == "error" and "no room" in done["a"].error
    assert done["b"].token_ids == finals(runner_of(MODEL), [request("b", 4, 6)])["b"]
    assert runner.scheduler.pages_used == 0


def test_streams_on_one_runner_do_not_touch_each_other() -> None:
    runner = runner_of(MODEL)
    alone = finals(runner_of(MODEL), [request("a", 5, 9), request("b", 7, 6)])
    first, second = runner.stream(request("a", 5, 9)), runner.stream(request("b", 7, 6))
    seen: dict[str, tuple[int, ...]] = {}
    for pair in itertools.zip_longest(first, second):
        seen |= {event.request_id: event.token_ids for event in pair if isinstance(event, Finished)}
    assert seen == alone
    going = runner.stream(request("a", 5, 9))
    next(going)
    assert [e.reason for e in runner.stream(request("a", 3, 2)) if isinstance(e, Finished)] == ["refused"]
    assert [e.token_ids for e in going if isinstance(e, Finished)] == [alone["a"]]


def test_requests_wait_for_their_arrival() -> None:
    """On a clock that only sleeping moves."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    runner = runner_of(MODEL, clock=lambda: now[0], sleep=sleep)
    late, early = replace(request("late", 4, 2), arrival=0.5), replace(request("early", 4, 2), arrival=0.25)
    submitted = [event for event in runner.stream([late, early]) if isinstance(event, Submitted)]
    assert [(e.request_id, e.arrival) for e in submitted] == [("early", 100.25), ("late", 100.5)]
    assert all(abs(e.time - e.arrival) < 0.011 for e in submitted)


def test_the_last_step_counts_its_pages() -> None:
    steps = [e for e in runner_of(MODEL).stream(request("a", 5, 1)) if isinstance(e, Stepped)]
    assert [(s.pages_used, s.phase, s.prefill_tokens) for s in steps] == [(4, "prefill", 5)]  # 2 pages in 2 groups
    assert steps[0].kv_bytes == 2 * 4 * MODEL_BYTES


def test_a_chunk_of_one_prompt_token_is_prefill() -> None:
    steps = [e for e in runner_of(MODEL, max_num_batched_tokens=1).stream(request("a", 3, 3)) if isinstance(e, Stepped)]
    assert [s.phase for s in steps] == ["prefill"] * 3 + ["decode"] * 2


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
    assert not runner.busy


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
    asked = [request("a", 4, 4), request("b", 4, 4), request("a", 3, 4)]
    ends = sorted((e.request_id, e.reason) for e in runner.stream(asked) if isinstance(e, Finished))
    assert ends == [("a", "length"), ("a", "refused"), ("b", "length")]


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
