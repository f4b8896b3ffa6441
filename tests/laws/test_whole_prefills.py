"""With chunked_prefill off, a prompt is computed in one step, whatever runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import parse_policy
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, Turn
from workbench.scheduler.scheduler import Scheduler

STEP = 16  # tokens
BUILT_IN = ("fcfs", "prefill_first", "decode_first", "shortest_prompt", "priority", "fair", "deadline")


def greedy(state: SchedulerState) -> SchedulerDecision:
    """A user's policy, which asks for the part of a prompt that the step has room for."""
    turns, left = [], state.limits.max_num_batched_tokens
    for entry in (*state.running, *state.waiting):
        turns.append(Turn(entry, min(entry.num_new_tokens, left)))
        left -= turns[-1].max_tokens
    return SchedulerDecision(turns)


@pytest.mark.parametrize("policy", [*BUILT_IN, greedy])
@given(st.lists(st.tuples(st.sampled_from([1, 8, STEP - 1, STEP]), st.integers(1, 3)), min_size=1, max_size=6))
@example([(4, 3), (STEP, 1)])
@example([(1, 1), (STEP, 1), (STEP, 1)])
def test_no_prompt_that_fits_into_a_step_is_cut(policy: Any, asked: list[tuple[int, int]]) -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=STEP, chunked_prefill=False)
    manager = KVCacheManager((PagePool(100, 4),), (KVCacheGroup(),), STEP)
    chosen = parse_policy(policy, "continuous") if isinstance(policy, str) else policy
    scheduler = Scheduler(manager, limits, 200, chosen)
    for number, (prompt, output) in enumerate(asked):
        request = Request(f"r{number}", (0,) * prompt, SamplingParameters(max_tokens=output))
        scheduler.submit(Sequence.from_request(request, number))
    prefilled = []
    while (plan := scheduler.plan()) is not None:
        for span in plan.spans:
            if span.start < span.sequence.prompt_length:
                assert (span.start, span.length) == (0, span.sequence.prompt_length)
                prefilled.append(span.sequence.request_id)
        scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample})
        for span in plan.spans:
            if len(span.sequence.output_ids) == span.sequence.request.sampling.max_tokens:
                scheduler.finish(span.sequence, FinishReason.LENGTH)
    assert sorted(prefilled) == [f"r{number}" for number in range(len(asked))]
