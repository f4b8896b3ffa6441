"""The runner against the oracle, and what happens to requests that end early or badly."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import (
    CONTEXT,
    Objection,
    Oracle,
    finals,
    layer,
    model_of,
    own_specs,
    request,
    runner_of,
    spec_of,
)
from tests.thorough import tries
from workbench.engine import naive
from workbench.engine.runner import generate
from workbench.model.spec import ModelSpec
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished, Preempted, Stepped, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
MODEL_BYTES = 2 * 2 * 2 * 4 * 4  # a token: layers, keys and values, groups, dim, bytes


jobs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=5)


DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64])


@settings(max_examples=tries(50))
@given(own_specs, DTYPES, jobs, st.integers(1, 24), st.integers(1, 4), st.integers(1, 7), st.randoms())
def test_every_row_is_the_oracles(
    spec: ModelSpec, dtype: torch.dtype, sizes: list, budget: int, seqs: int, page_size: int, shuffle: random.Random
) -> None:
    """Random models with any attention, precisions, prompts, budgets, page sizes, page orders and orders of arrival."""
    pages = -(-29 // page_size) + shuffle.randrange(12)
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in spec.kv_cache_groups)
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
    assert runner.scheduler.pages_in_use == 0


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


def test_preemption_changes_nothing() -> None:
    requests = [request(f"r{i}", 9, 14, temperature=0.9, seed=i) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    scarce = runner_of(MODEL, pages=9)
    events = list(scarce.stream(requests))
    assert any(isinstance(event, Preempted) for event in events)
    assert {e.request_id: e.token_ids for e in events if isinstance(e, Finished)} == roomy


@given(st.integers(0, 40), st.integers(0, 3), st.data())
@settings(max_examples=tries(40))
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
            held = [page for s in runner.scheduler.running for pages in s.pages for page in pages if page]
            assert runner.scheduler.pages_in_use == len(held)
        events.append(event)
    ends = [e for e in events if isinstance(e, Finished)]
    assert sorted(e.request_id for e in ends) == [f"r{i}" for i in range(4)], "one end each"
    for end in ends:
        if end.reason != "cancelled":
            assert end.token_ids == alone[end.request_id]
    assert runner.scheduler.pages_in_use == 0


def test_closing_the_stream_cancels_the_rest() -> None:
    runner = runner_of(MODEL)
    stream = runner.stream([request("a", 5, 30), request("b", 5, 30)])
    for event in stream:
        if isinstance(event, Decoded):
            break
    stream.close()  # type: ignore[attr-defined]
    assert not runner.has_unfinished_requests and runner.scheduler.pages_in_use == 0


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


def test_the_context_is_the_last_limit() -> None:
    done = generate(runner_of(MODEL), [request("a", CONTEXT - 3, 50)])
    assert done["a"].reason == "length" and len(done["a"].token_ids) == 3


def test_end_tokens_and_their_being_ignored() -> None:
    tokens = finals(runner_of(MODEL), [request("a", 6, 10)])["a"]
    ending = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5), eos_token_ids=(tokens[4],)))
    asked = Request("a", request("a", 6, 10).prompt_ids, SamplingParameters(temperature=0, max_tokens=10))
    done = generate(runner_of(ending), [asked])["a"]
    first = tokens.index(tokens[4])
    assert done.reason == "stop" and done.token_ids == tokens[: first + 1]
    assert finals(runner_of(ending), [request("a", 6, 10)])["a"] == tokens
