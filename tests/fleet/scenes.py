"""Small fleets whose clocks tick coarsely, so that much happens at the same moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from workbench.cache.tables import Table
from workbench.engine.policies import FCFS, DecodeFirst, Fair, PrefillFirst, Priority, ShortestPrompt, Static
from workbench.engine.policy import State, Wishes
from workbench.engine.scheduler import Limits
from workbench.fleet.fleet import Failure, Fleet, Pool, Transfer
from workbench.fleet.machine import Machine
from workbench.fleet.routers import LeastLoaded, PrefixAware, RoundRobin, SessionSticky
from workbench.fleet.work import SECOND, Form, Seen, StepTimes
from workbench.traffic.arrival import Arrival
from workbench.traffic.source import Closed, Open

TICK = 1 / SECOND


def _fcfs_by_hand(state: State) -> Wishes:
    """A policy that promises nothing: it is asked before every step."""
    return FCFS()(state)


def over_budget(state: State) -> Wishes:
    """A policy that wishes more than a step has for every prompt of 3 tokens, 5, 7, ...: they end with it."""
    wishes = FCFS()(state)
    odd = {entry.id for entry in (*state.running, *state.waiting) if entry.prompt % 2 and entry.prompt > 1}
    return replace(wishes, tokens=[(name, state.budget + 1 if name in odd else n) for name, n in wishes.tokens])


BLOCK = 4

TICKS = st.integers(0, 3)
FORMS = st.builds(
    Form, step=st.integers(1, 6), prefill=TICKS, decode=TICKS, sampled=TICKS, head=TICKS,
    pairs=st.tuples(TICKS, TICKS), read=st.tuples(TICKS, TICKS),
)  # fmt: skip
POLICIES = st.sampled_from(
    [
        None, PrefillFirst(), DecodeFirst(), ShortestPrompt(), Priority(), Fair(), Static(FCFS()), _fcfs_by_hand,
        over_budget,
    ]
)  # fmt: skip
ROUTERS = st.sampled_from([RoundRobin(), LeastLoaded(), PrefixAware(request_tokens=3), SessionSticky()])


@st.composite
def machines(draw: Any, arrives: bool = False) -> Machine:
    windows = draw(st.sampled_from([(), ((5, 0),), ((6, 2),)]))
    kinds = (Seen(None, 0), *(Seen(*window) for window in windows))
    tables = tuple(Table((layer,), kind.window, kind.sinks) for layer, kind in enumerate(kinds))
    times = StepTimes("drawn", kinds, tuple(draw(st.lists(FORMS, min_size=1, max_size=2))))
    pages = tuple(draw(st.integers(12, 40)) for _ in tables)
    limits = Limits(draw(st.integers(1, 5)), draw(st.integers(2, 12)))
    prefix = draw(st.booleans())
    ttl = draw(st.sampled_from([None, 50 * TICK])) if prefix else None
    return Machine(
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
def scenes(draw: Any, failing: bool = True) -> dict[str, Any]:
    """What a Fleet takes, with the arrivals and the number of clients (None: open) in place of a source."""
    split = draw(st.booleans())
    pool = Pool(draw(machines()), draw(st.integers(1, 3)), draw(ROUTERS))
    decode = Pool(replace(pool.machine, arrives=True), draw(st.integers(1, 2)), draw(ROUTERS)) if split else None
    count = pool.count + (decode.count if decode else 0)
    failures = []
    for _ in range(draw(st.integers(0, 3)) if failing else 0):
        down = draw(st.sampled_from([1, 7, 60, None]))  # or for good
        at = draw(st.integers(0, 300)) * TICK
        failures.append(Failure(draw(st.integers(0, count - 1)), at, down and down * TICK))
    transfer = Transfer(draw(st.sampled_from([1e15, 2e15])), draw(st.integers(0, 5)) * TICK)
    return {
        "arrivals": draw(arrivals()), "clients": draw(st.sampled_from([None, None, 1, 3])), "pool": pool,
        "decode": decode, "failures": failures, "transfer": transfer,
    }  # fmt: skip


def fleet(scene: dict[str, Any], **changes: Any) -> Fleet:
    rest = {**scene, **changes}
    made: Sequence[Arrival] = rest.pop("arrivals")
    clients, pool = rest.pop("clients"), rest.pop("pool")
    return Fleet(Open(made) if clients is None else Closed(made, clients, 2 * TICK), pool, rest.pop("decode"), **rest)


def told(run: Fleet) -> tuple[list[tuple], list[tuple]]:
    """All that is known of every job and instance; how many moves it took is not."""
    jobs = [
        (
            job.name, job.came, job.first_scheduled, job.first_token, job.last_token, job.longest_gap, job.ended,
            job.error, job.produced, job.cached_tokens, job.computed_tokens, job.set_backs, job.retries,
            tuple(job.places),
        )
        for job in run.jobs
    ]  # fmt: skip
    instances = []
    for instance in run.instances:
        tally = vars(instance.tally).copy()
        del tally["moves"]
        pools = instance.scheduler.pools
        kept = [pool.available if instance.machine.ttl else (pool.free, len(pool.idle)) for pool in pools]
        instances.append((tuple(tally.items()), kept))  # what is over is given up when somebody looks, and not before
    return jobs, instances
