"""Log-probabilities of prompts: the oracle's, however the prompt is computed, and complete before the first token."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.at_rest import at_rest
from tests.engine.tiny import VOCAB, carried, layer, model_of, runner_of, spec_of, specs
from tests.helpers.events import of
from tests.helpers.recorded import Changed
from tests.thorough import tries
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.sampling import prompt_logprobs
from workbench.scheduler.plan import MAX_SCORED_TOKENS
from workbench.trace.events import Decoded, Event, Finished, Preempted, Prefilled, PromptLogprob, Submitted

TOP = 3


def scored(name: str, ids: tuple[int, ...], top: int | None = TOP, most: int = 4, **sampling) -> Request:
    values = {"temperature": 0, "ignore_eos": True, **sampling}
    return Request(name, ids, SamplingParameters(max_tokens=most, prompt_logprobs=top, **values))


def gathered(events: list[Event]) -> dict[str, tuple[PromptLogprob, ...]]:
    """Return what the chunks of each request give: all of it before its first token, and what its end says."""
    found: dict[str, tuple[PromptLogprob, ...]] = defaultdict(tuple)
    lengths: dict[str, int] = {}
    for event in events:
        if isinstance(event, Submitted):
            lengths[event.request_id] = event.prompt_tokens
        elif isinstance(event, Prefilled):
            found[event.request_id] += event.logprobs
        elif isinstance(event, Decoded):
            assert len(found[event.request_id]) in (0, lengths[event.request_id])
        elif isinstance(event, Finished) and not event.sample:
            assert event.reason == "length", event.error
            assert found[event.request_id] == event.prompt_logprobs
            assert len(event.prompt_logprobs) in (0, event.prompt_tokens)
    return found


def check(model: Transformer, request: Request, found: tuple[PromptLogprob, ...]) -> None:
    """Hold each against the oracle in float64: log-softmax moves by twice what the logits move, at most."""
    ids = torch.tensor(request.prompt_ids)
    exact, plain = naive.logits(model, ids, torch.float64), naive.logits(model, ids).double()
    rounding = 8 * torch.finfo(model.dtype).eps * (1 + exact.abs().amax(-1))
    bounds = 4 * (plain - exact).abs().amax(-1) + rounding
    expected = exact.log_softmax(-1)
    assert [each.token_id for each in found] == list(request.prompt_ids)
    assert found[0] == PromptLogprob(request.prompt_ids[0], None)
    for place, (token, logprob, top) in enumerate(found[1:]):
        row, bound = expected[place], 2 * bounds[place].item()
        errors = [abs(row[token].item() - (logprob or 0.0)), *(abs(row[id].item() - value) for id, value in top)]
        if max(errors) > bound:
            bound += 2 * carried(model, list(request.prompt_ids[: place + 1]), exact[place])
        assert max(errors) <= bound
        assert len(top) == request.sampling.prompt_logprobs
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert all(row[id] >= row.topk(TOP).values[-1] - 2 * bound for id, _ in top)


@pytest.fixture(autouse=True)
def rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the number of rows that are scored at once back, which a test may change."""
    monkeypatch.setattr(prompt_logprobs, "ROWS_AT_ONCE", prompt_logprobs.ROWS_AT_ONCE)


def texts(draw: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts with beginnings in common, so that a cache has something to offer."""
    base = random_token_ids(draw, VOCAB, 30)
    return [base[: draw.randrange(0, 20)] + random_token_ids(draw, VOCAB, draw.randrange(1, 14)) for _ in range(count)]


@settings(max_examples=tries(24))
@given(
    spec=specs,
    seed=st.integers(0, 10**6),
    pages=st.sampled_from([12, 14, 40]),
    tokens=st.sampled_from([3, 16, 64]),
    prefix=st.sampled_from(["radix", "off"]),
    offload=st.sampled_from(["none", "memory"]),
    rows=st.sampled_from([1, 3, 32]),
)
def test_they_are_the_oracles(spec, seed: int, pages: int, tokens: int, prefix: str, offload: str, rows: int) -> None:
    model, draw = model_of(spec, seed), random.Random(seed)
    prompt_logprobs.ROWS_AT_ONCE = rows
    runner = runner_of(model, pages=pages, max_num_batched_tokens=tokens, prefix=prefix, offload=offload)
    for _ in range(2):  # the same ids again
        prompts = texts(draw, 4)
        requests = [
            scored(str(n), ids, draw.choice([None, TOP, TOP]), draw.randrange(1, 9), n=draw.choice([1, 1, 2]))
            for n, ids in enumerate(prompts)
        ]
        found = gathered(list(runner.stream(requests)))
        for request in requests:
            if request.sampling.prompt_logprobs is None:
                assert found[request.request_id] == ()
            else:
                check(model, request, found[request.request_id])
    at_rest(runner)


def test_a_prompt_is_computed_anew_and_cached_for_others() -> None:
    runner = runner_of(model_of(spec_of()), prefix="radix")
    ids = random_token_ids(random.Random(1), VOCAB, 21)
    plain = scored("plain", ids, None)
    cached = {}
    for request in (scored("first", ids), scored("again", ids), plain):
        (end,) = of(Finished, runner.stream([request]))
        cached[request.request_id] = end.cached_tokens
    assert cached == {"first": 0, "again": 0, "plain": 20}


def test_a_preempted_prompt_reads_what_was_scored_and_no_more() -> None:
    """Its own pages come back from the cache as far as their logits were taken."""
    model = model_of(spec_of())
    preempted, cached = 0, 0
    for seed in range(3):
        draw = random.Random(seed)
        runner = runner_of(model, pages=12, max_num_batched_tokens=2, prefix="radix")
        # The first grows while the second is read, a token a step, and needs its pages.
        requests = [
            scored(str(n), random_token_ids(draw, VOCAB, long), most=most) for n, long, most in ((0, 3, 40), (1, 30, 4))
        ]
        events = list(runner.stream(requests))
        preempted += sum(isinstance(event, Preempted) and event.request_id == "1" for event in events)
        cached += sum(event.cached_tokens for event in of(Finished, events))
        found = gathered(events)
        for request in requests:
            check(model, request, found[request.request_id])
    assert preempted and cached


def test_a_step_has_few_rows_of_logits() -> None:
    spec = spec_of().model_copy(update={"max_position_embeddings": 1000})
    model = model_of(spec)
    runner = runner_of(model, pages=300, max_num_batched_tokens=512, page_size=16)
    rows: list[int] = []
    Changed(runner, lambda plan, logits: rows.append(len(logits)) or logits)
    draw = random.Random(5)
    long = [scored(str(n), random_token_ids(draw, VOCAB, 300), 0, 2) for n in range(3)]
    found = gathered(list(runner.stream(long)))
    assert max(rows) <= MAX_SCORED_TOKENS + len(long) and sum(rows) >= 3 * 299
    assert all(len(found[each.request_id]) == 300 for each in long)


def test_who_does_not_ask_has_one_row() -> None:
    runner = runner_of(model_of(spec_of()))
    spans = []
    Changed(runner, lambda plan, logits: spans.extend(plan.spans) or logits)
    list(runner.stream([scored("a", tuple(range(20)), None)]))
    assert {span.requested_logits for span in spans} == {None} and max(span.num_logits for span in spans) == 1


def test_whole_prompts_are_scored_without_chunks() -> None:
    spec = spec_of().model_copy(update={"max_position_embeddings": 1000})
    runner = runner_of(model_of(spec), pages=100, page_size=16, chunked_prefill=False, max_num_batched_tokens=512)
    ids = random_token_ids(random.Random(1), VOCAB, 200)
    several = [scored(str(n), ids[n : n + 100]) for n in range(3)]
    found = gathered(list(runner.stream(several)))
    assert all(len(found[each.request_id]) == 100 for each in several)


def test_bad_logits_of_a_prompt_end_it_alone() -> None:
    def broken(plan, logits: torch.Tensor) -> torch.Tensor:
        logits, row = logits.clone(), 0
        for span in plan.spans:
            if span.sequence.request_id == "bad" and span.requested_logits:
                logits[row] = torch.nan
            row += span.num_logits
        return logits

    Changed(runner := runner_of(model_of(spec_of())), broken)
    ids = tuple(range(12))
    ends = {e.request_id: e for e in of(Finished, runner.stream([scored("bad", ids), scored("good", ids)]))}
    assert ends["bad"].reason == "error" and "logits of the prompt contain NaN" in ends["bad"].error
    assert ends["good"].reason == "length" and len(ends["good"].prompt_logprobs) == 12


def test_with_speculation_and_best_of() -> None:
    model = model_of(spec_of(layer(), layer(sliding_window=7)))
    runner = runner_of(model, pages=60, speculate={"kind": "prompt_lookup"})
    draw = random.Random(3)
    requests = [scored("a", random_token_ids(draw, 4, 20), most=12), scored("b", (1, 2, 3, 1, 2), n=2, best_of=3)]
    events = list(runner.stream(requests))
    for request in requests:
        chunks = [each for e in events if isinstance(e, Prefilled) and e.request_id == request.request_id
                  for each in e.logprobs]  # fmt: skip
        check(model, request, tuple(chunks))
