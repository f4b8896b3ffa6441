"""Small fleets whose clocks tick coarsely, so that much happens at the same moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from workbench.kv_cache.pages import KVCacheGroup
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import FCFS, DecodeFirst, Fair, PrefillFirst, Priority, ShortestPrompt, StaticBatching
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, Turn
from workbench.simulate.arrival import Arrival
from workbench.simulate.fleet import Fleet, InstanceFailure, InstancePool, KVTransfer
from workbench.simulate.instance import InstanceSpec
from workbench.simulate.routers import LeastLoaded, PrefixAware, RoundRobin, SessionSticky
from workbench.simulate.source import ClosedLoopSource, OpenLoopSource
from workbench.simulate.step_times import TICKS_PER_SECOND, AttentionReach, LinearCost, StepTimeModel

TICK = 1 / TICKS_PER_SECOND
Scene = dict[str, Any]  # the arguments of `fleet`


def _fcfs_by_hand(state: SchedulerState) -> SchedulerDecision:
    """A policy that promises nothing: it is asked before every step."""
    return FCFS()(state)


def wrong_turns(state: SchedulerState) -> SchedulerDecision:
    """A policy that gives every prompt of 3 tokens, 5, 7, ... a turn of no number: they end in an error."""
    return SchedulerDecision(
        [
            Turn(entry, -1) if entry.num_prompt_tokens % 2 and entry.num_prompt_tokens > 1 else entry
            for entry in (*state.running, *state.waiting)
        ]
    )


BLOCK = 4

TICKS = st.integers(0, 3)
FORMS = st.builds(
    LinearCost, step=st.integers(1, 6), prefill_tokens=TICKS, decode_tokens=TICKS, num_logits=TICKS, head=TICKS,
    query_key_pairs=st.tuples(TICKS, TICKS), positions_read=st.tuples(TICKS, TICKS),
)  # fmt: skip
POLICIES = st.sampled_from(
    [
        None, PrefillFirst(), DecodeFirst(), ShortestPrompt(), Priority(), Fair(), StaticBatching(FCFS()),
        _fcfs_by_hand, wrong_turns,
    ]
)  # fmt: skip
ROUTERS = st.sampled_from([RoundRobin(), LeastLoaded(), PrefixAware(request_tokens=3), SessionSticky()])


@st.composite
def machines(draw: Any, arrives: bool = False) -> InstanceSpec:
    windows = draw(st.sampled_from([(), ((5, 0),), ((6, 2),)]))
    kinds = (AttentionReach(None, 0), *(AttentionReach(*window) for window in windows))
    tables = tuple(KVCacheGroup((layer,), *kind) for layer, kind in enumerate(kinds))
    costs = st.lists(FORMS, min_size=1, max_size=2).map(tuple)
    times = StepTimeModel("drawn", kinds, draw(costs), tuple(draw(st.lists(costs, max_size=2))))
    pages = tuple(draw(st.integers(12, 40)) for _ in tables)
    limits = SchedulerLimits(max_num_seqs=draw(st.integers(1, 5)), max_num_batched_tokens=draw(st.integers(2, 12)))
    prefix = draw(st.booleans())
    ttl = draw(st.sampled_from([None, 50 * TICK])) if prefix else None
    return InstanceSpec(
        times, tables, pages, tuple(8 for _ in tables), draw(st.sampled_from([2, 4])), draw(st.integers(20, 60)),
        limits, draw(POLICIES), prefix, ttl, arrives, draw(st.sampled_from([0.0, 0.25])),
    )  # fmt: skip


@st.composite
def arrivals(draw: Any, most: int = 14) -> tuple[Arrival, ...]:
    now, made = 0, []
    for number in range(draw(st.integers(1, most))):
        now += draw(st.sampled_from([0, 0, 1, 3, 10, 40]))
        prompt, blocks = draw(st.integers(1, 18)), ()
        if draw(st.booleans()):
            first = draw(st.integers(0, 1))
            blocks = tuple(first + 2 * place for place in range(-(-prompt // BLOCK)))
        session = str(draw(st.integers(0, 3)))
        made.append(Arrival(now * TICK, prompt, draw(st.integers(1, 25)), session, str(number % 2), blocks, BLOCK))
    return tuple(made)


@st.composite
def scenes(draw: Any, failing: bool = True) -> Scene:
    """Draw the arguments of a Fleet, with the arrivals and the number of clients (None: open) in place of a source."""
    split = draw(st.booleans())
    pool = InstancePool(draw(machines()), draw(st.integers(1, 3)), draw(ROUTERS))
    decode = (
        InstancePool(replace(pool.spec, receives_kv=True), draw(st.integers(1, 2)), draw(ROUTERS)) if split else None
    )
    count = pool.count + (decode.count if decode else 0)
    failures = []
    for _ in range(draw(st.integers(0, 3)) if failing else 0):
        down = draw(st.sampled_from([1, 7, 60, None]))  # or for good
        at = draw(st.integers(0, 300)) * TICK
        failures.append(InstanceFailure(draw(st.integers(0, count - 1)), at, down and down * TICK))
    transfer = KVTransfer(draw(st.sampled_from([1e15, 2e15])), draw(st.integers(0, 5)) * TICK)
    return {
        "arrivals": draw(arrivals()), "clients": draw(st.sampled_from([None, None, 1, 3])), "pool": pool,
        "decode": decode, "failures": failures, "transfer": transfer,
    }  # fmt: skip


def fleet(scene: Scene, **changes: Any) -> Fleet:
    rest = {**scene, **changes}
    made: Sequence[Arrival] = rest.pop("arrivals")
    clients, pool = rest.pop("clients"), rest.pop("pool")
    return Fleet(
        OpenLoopSource(made) if clients is None else ClosedLoopSource(made, clients, 2 * TICK),
        pool,
        rest.pop("decode"),
        **rest,
    )


def outcome(run: Fleet) -> tuple[list[tuple], list[tuple]]:
    """All that is known of every job and instance; how many moves it took is not."""
    jobs = [
        (
            job.name, job.arrival_time, job.first_scheduled, job.first_token, job.last_token, job.longest_gap,
            job.finish_time, job.error, job.generated_tokens, job.cached_tokens, job.computed_tokens,
            job.num_preemptions, job.retries, tuple(job.instances),
        )
        for job in run.jobs
    ]  # fmt: skip
    instances = []
    for instance in run.instances:
        tally = vars(instance.counters).copy()
        del tally["plans"]
        pools = instance.scheduler.pools
        kept = [pool.num_available if instance.spec.ttl else (pool.num_free, len(pool.evictable)) for pool in pools]
        instances.append((tuple(tally.items()), kept))  # the next look-up drops expired entries
    return jobs, instances
