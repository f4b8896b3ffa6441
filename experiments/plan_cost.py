"""Measure the processor time of the scheduler's plan() with 64 running sequences: `python -m experiments.plan_cost
[--json]`.

No model runs: pages and tokens are counted as if one did. If slots are free and a waiting request does not fit, the
policy is called before every step.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import typer

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.request import Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import BUILT_IN_POLICIES, parse_policy
from workbench.scheduler.scheduler import Scheduler

SEQS, PAGE, BUDGET, CONTEXT = 64, 64, 4096, 65_536
STEPS, WARM_UP_STEPS = 150, 20  # steps planned, and steps of warm-up (with prefill) that do not count
STEP_SECONDS = 0.025  # of a step, as policies see it


def seconds(policy: str, waiting: int) -> list[float]:
    """Return the processor seconds of each step's plan, with `waiting` requests that do not fit into the cache."""
    manager = KVCacheManager((PagePool(SEQS * 8, PAGE),), (KVCacheGroup(),), BUDGET)
    scheduler = Scheduler(
        manager, SchedulerLimits(max_num_seqs=SEQS + 8, max_num_batched_tokens=BUDGET), CONTEXT, parse_policy(policy)
    )
    for order, length in enumerate([256 + order for order in range(SEQS)] + [20_000] * waiting):
        request = Request(f"r{order}", tuple(range(length)), SamplingParameters(max_tokens=STEPS + 50))
        sequence = Sequence.from_request(request, order)
        sequence.arrival_time = STEPS * STEP_SECONDS  # none is late before the end, and a policy may choose among all
        scheduler.submit(sequence)
    spent = []
    for step in range(STEPS):
        began = time.thread_time()
        plan = scheduler.plan(now=step * STEP_SECONDS)
        if step >= WARM_UP_STEPS:
            spent.append(time.thread_time() - began)
        assert plan is not None
        scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample})
    return spent


def main(as_json: Annotated[bool, typer.Option("--json")] = False, rounds: int = 3) -> None:
    rows = []
    for policy in BUILT_IN_POLICIES:
        for waiting in (0, 1, 20, 100, 1000):
            medians = [1e6 * statistics.median(seconds(policy, waiting)) for _ in range(rounds)]
            rows.append({"policy": policy, "running": SEQS, "waiting": waiting, "plan_us": min(medians)})
            if not as_json:
                print(f"{policy:16} {waiting:5} wait: {min(medians):6.0f} us a plan")
    if as_json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    typer.run(main)
