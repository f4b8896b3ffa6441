"""Pages found again: how many, for how long, and what is written of them. That rows are the oracle's: tests/laws."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.memory import nodes
from tests.engine.poison import MODEL, asked
from tests.engine.tiny import runner_of
from tests.thorough import tries
from workbench.engine.runner import generate
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event


def test_a_prefix_is_computed_once() -> None:
    cold, warm = runner_of(MODEL), runner_of(MODEL, prefix="radix")
    first, second = asked("a", 17, 3, 5), asked("b", 17, 4, 5)
    generate(warm, [first])
    found = generate(warm, [second])["b"]
    assert found.token_ids == generate(cold, [second])["b"].token_ids
    assert (found.cached_tokens, found.computed_tokens) == (16, 21 - 16 + 4)
    assert found.shared_pages == 4 + 1  # all of the full layer's pages; of the window's that of positions 12 to 15
    again = generate(warm, [replace(second, request_id="c")])["c"]
    assert again.cached_tokens == 20  # the last prompt token is always computed
    assert generate(warm, [asked("d", 17, 4, 5, cache_salt="other")])["d"].cached_tokens == 0
    warm.reset_prefix_cache()
    assert generate(warm, [replace(second, request_id="e")])["e"].cached_tokens == 0
    assert warm.scheduler.pages_in_use == 0


def test_a_conversation_goes_on_where_it_ended() -> None:
    """The output, too, is found again, after a stop as after a limit; a cancelled request leaves what it computed."""
    runner = runner_of(MODEL, prefix="radix")
    tokens = generate(runner, [asked("a", 0, 9, 12)])["a"].token_ids
    stopped = replace(asked("b", 0, 9, 12), prompt_ids=asked("a", 0, 9, 12).prompt_ids)
    stopped = replace(stopped, sampling=stopped.sampling.model_copy(update={"stop_token_ids": (tokens[7],)}))
    runner.reset_prefix_cache()
    end = generate(runner, [stopped])["b"]
    assert end.reason == "stop"
    computed = 9 + len(end.token_ids) - 1
    turn = replace(stopped, request_id="c", prompt_ids=(*stopped.prompt_ids, *end.token_ids, 1, 2))
    assert generate(runner, [turn])["c"].cached_tokens == computed // 4 * 4
    runner.reset_prefix_cache()
    for event in runner.stream([asked("long", 18, 1, 20)]):
        if isinstance(event, Decoded) and event.index == 3:
            runner.cancel("long")
    assert generate(runner, [asked("next", 18, 2, 1)])["next"].cached_tokens == 16


def test_time_to_live() -> None:
    now = [0.0]
    runner = runner_of(MODEL, prefix={"kind": "radix", "ttl": 10}, clock=lambda: now[0], sleep=lambda _: None)
    generate(runner, [asked("a", 17, 3, 5)])
    for seconds, found in ((9.0, 16), (9.0, 16), (10.5, 0)):  # each use begins it anew
        now[0] += seconds
        assert generate(runner, [asked("b", 17, 3, 5)])["b"].cached_tokens == found


def test_what_broke_is_not_offered() -> None:
    runner = runner_of(MODEL, prefix="radix")
    forward = runner.core.executor.forward
    runner.core.executor.forward = lambda plan: forward(plan) * torch.nan  # type: ignore[method-assign]
    assert generate(runner, [asked("a", 17, 3, 5)])["a"].reason == "error"
    runner.core.executor.forward = forward  # type: ignore[method-assign]
    assert all(pool.num_free == pool.num_pages for pool in runner.scheduler.pools)
    # scrubbing cleaned the pages that were held, and nothing was offered
    assert generate(runner, [asked("b", 17, 3, 5)])["b"].cached_tokens == 0


@settings(max_examples=tries(25))
@given(st.integers(0, 10**6), st.sampled_from([14, 22, 200]))
def test_what_is_written_to_the_index_is_counted_once(seed: int, pages: int) -> None:
    """Tokens written by requests are the tokens the index received: with pages enough, exactly those it holds. Reads,
    writes and the rest add up to a prompt, and no request reads what was not written before."""
    draw, runner = random.Random(seed), runner_of(MODEL, pages=pages, prefix="radix")
    roots, size = [tuple(draw.randrange(3) for _ in range(24)) for _ in range(2)], runner.store.page_size
    index = runner.kv_cache.manager.prefix_cache
    assert index is not None
    known: set[int] = set()
    came = 0

    def stored() -> set[int]:
        return {id(node) for node in nodes(index) if any(node.pages) or any(node.cpu_pages)}

    def held(event: Event) -> None:
        nonlocal known, came
        if event.kind == "stepped":
            now = stored()
            came, known = came + len(now - known), now

    runner.telemetry.listener = held
    requests = [
        Request(f"r{n}", draw.choice(roots)[: draw.randrange(1, 24)] + (n % 5,), SamplingParameters(
            max_tokens=draw.randrange(1, 9), temperature=0, ignore_eos=True, n=draw.choice([1, 1, 2])))
        for n in range(10)
    ]  # fmt: skip
    ends = list(generate(runner, requests).values())
    written = sum(end.written_tokens for end in ends)
    assert written == index.written_tokens and written % size == 0
    assert written == came * size if pages == 200 else written >= came * size
    assert all(0 <= end.written_tokens <= end.computed_tokens for end in ends)
    if pages == 200:
        assert written == len(stored()) * size
        for end in ends:  # none was preempted, and what it read is no part of what it wrote
            assert end.cached_tokens + end.computed_tokens == end.prompt_tokens + len(end.token_ids) - 1
            assert end.cached_tokens + end.written_tokens <= end.prompt_tokens + len(end.token_ids) - 1
        again = generate(runner, [replace(each, request_id=f"{each.request_id} again") for each in requests])
        assert sum(end.written_tokens for end in again.values()) == 0
        assert any(end.cached_tokens for end in again.values()) == any(end.written_tokens for end in ends)
