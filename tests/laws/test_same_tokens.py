"""Greedy tokens equal the oracle's: read this law first.

`workbench/oracle/naive.py` continues one text without cache, batch or pages. Whatever the engine does with a request,
it must come to the same logits, within the rounding of its precision, and so to the same tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kinds import dense_models, mixtures, sharing_models
from tests.engine.poison import asked, poisoned
from tests.engine.tiny import Objection, Oracle, finals, layer, model_of, own_specs, request, runner_of, spec_of
from tests.thorough import tries
from workbench.engine.runner import generate
from workbench.model.spec import ModelSpec
from workbench.oracle import naive
from workbench.trace.events import Finished, Preempted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64])
# Which experts are chosen jumps where two scores meet: only float64 is sure to choose as the oracle does.
MODELS = st.tuples(st.one_of(own_specs, dense_models, sharing_models()), DTYPES) | st.tuples(
    mixtures, st.just(torch.float64)
)
# Tokens that prompts may have in common, of the prompt's own and of the output; which beginning; and samples.
JOBS = st.lists(
    st.tuples(
        st.integers(0, 18), st.integers(1, 9), st.integers(1, 9), st.integers(0, 1), st.sampled_from([1, 1, 2, 3])
    ),
    min_size=1, max_size=4,
)  # fmt: skip
CACHES = st.fixed_dictionaries({
    "page_size": st.integers(1, 7), "prefix": st.sampled_from(["off", "radix"]),
    "offload": st.sampled_from(["none", {"kind": "memory", "bytes": 200_000}]),
})  # fmt: skip


@settings(max_examples=tries(120))
@given(MODELS, JOBS, st.integers(1, 24), st.integers(1, 4), CACHES, st.randoms(use_true_random=False))
def test_greedy_tokens_equal_oracle(
    drawn: tuple[ModelSpec, torch.dtype], jobs: list, budget: int, seqs: int, cache: dict, shuffle: random.Random
) -> None:
    """Any layers, precision, prompts, budgets, page sizes, orders of pages and of arrival, prefixes, CPU pages; and
    pages that were found again are those that were written: free ones are NaN before each step."""
    model = model_of(drawn[0], shuffle.randrange(99), dtype=drawn[1])
    pages = -(-36 // cache["page_size"]) + shuffle.randrange(12)
    orders = tuple(shuffle.sample(range(1, pages + 1), pages) for _ in model.spec.kv_cache_groups)
    runner = runner_of(
        model, max_num_seqs=seqs, max_num_batched_tokens=budget, pages=pages, page_orders=orders, **cache
    )
    oracle = poisoned(runner)  # holds every row of logits
    requests = [
        asked(f"r{i}", *each[:4], n=each[4], temperature=0.7 if each[4] > 1 else 0) for i, each in enumerate(jobs)
    ]
    again = [replace(each, request_id=f"again {each.request_id}") for each in requests]
    shuffle.shuffle(requests)
    ends = generate(runner, [replace(each, arrival=shuffle.choice([0.0, 0.0, 0.002])) for each in requests])
    ends |= generate(runner, again)
    assert len(ends) == 2 * sum(each.sampling.n for each in requests)
    for end in ends.values():
        assert end.reason == "length", end.error
        needed = end.prompt_tokens + len(end.token_ids) - 1
        assert end.computed_tokens + end.cached_tokens + end.restored_tokens >= needed
    for each in [*requests, *again]:
        tokens = ends[each.request_id].token_ids
        assert len(tokens) == each.sampling.max_tokens
        if each.sampling.n == 1 and all(oracle.clear):  # no two tokens are so near that rounding decides
            assert list(tokens) == naive.greedy(model, list(each.prompt_ids), len(tokens))
    assert runner.scheduler.pages_in_use == 0
    runner.reset_prefix_cache()
    assert all(pool.num_used == 0 for pool in runner.scheduler.pools)


@pytest.mark.parametrize("budget", [6, 7, 8])
def test_a_prompt_of_the_steps_budget_equals_oracle(budget: int) -> None:
    prompt = request("a", 7, 12)
    found = finals(runner_of(MODEL, max_num_batched_tokens=budget), [prompt])["a"]
    assert list(found) == naive.greedy(MODEL, list(prompt.prompt_ids), 12)


def test_the_oracle_can_object() -> None:
    runner = runner_of(MODEL)
    Oracle(runner)
    forward = runner.core.executor.inner.forward  # type: ignore[attr-defined]
    runner.core.executor.inner.forward = lambda plan: forward(plan) + 0.01  # type: ignore[attr-defined]
    with pytest.raises(Objection):
        finals(runner, [request("a", 5, 3)])


def test_preempted_requests_have_the_same_tokens() -> None:
    requests = [request(f"r{i}", 9, 14, temperature=0.9, seed=i) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    events = list(runner_of(MODEL, pages=9).stream(requests))
    assert any(isinstance(event, Preempted) for event in events)
    assert {event.request_id: event.token_ids for event in events if isinstance(event, Finished)} == roomy
