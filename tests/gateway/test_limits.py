"""Limits: what is let in, given back and refused; memory and Redis agree to the unit."""

from __future__ import annotations

import asyncio
import itertools
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.event_loop import run_async
from tests.gateway.redis_server import RedisServer
from tests.patience import limit
from tests.thorough import tries
from workbench.gateway.limits.limits import (
    BUCKETS,
    DAY,
    MAX_A_MINUTE,
    SCALE,
    TOKENS,
    CallerLimits,
    Cost,
    Holder,
    Limiter,
    MemoryLimiter,
)
from workbench.gateway.limits.limits_redis import RedisLimiter

RATES = st.none() | st.integers(1, 60) | st.sampled_from([60, 7_919, MAX_A_MINUTE])
BUDGETS = st.none() | st.integers(0, 5_000).map(lambda micros: Decimal(micros) / 1_000_000)
LIMITS = st.builds(
    CallerLimits,
    requests_per_minute=RATES,
    tokens_per_minute=RATES,
    input_tokens_per_minute=RATES,
    output_tokens_per_minute=RATES,
    requests_at_once=st.none() | st.integers(1, 3),
    money_per_day=BUDGETS,
)
AMOUNTS = st.integers(0, 5) | st.integers(0, 60) | st.just(7_000_000)
COSTS = st.builds(Cost, st.just(1), AMOUNTS, AMOUNTS, AMOUNTS, st.integers(0, 2_000))
SECOND = 1_000_000
PASSED = st.sampled_from([0, 0, 1, 7 * SECOND, 40 * SECOND, SCALE - 1, SCALE, 110 * SECOND, -1_000, DAY // 3])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "give_back", "again", "twice", "renew"]),
        PASSED,
        COSTS,
        COSTS,
        st.integers(0, 5),
    ),
    min_size=4,
    max_size=25,
)
START = 20_700 * DAY - 30 * SECOND  # shortly before a day ends
names = itertools.count()


class Clock:
    def __init__(self, now: int = START):
        self.now = now

    def __call__(self) -> int:
        return self.now


async def _answers(limiter: Limiter, clock: Clock, holders: list[Holder], operations: list[Any]) -> list[Any]:
    """Return the answers to a history of calls, and what remains after each step."""
    answers: list[Any] = []
    begun: list[tuple[str, Cost, int]] = []
    for number, (operation, passed, cost, used, which) in enumerate(operations):
        clock.now += passed
        if operation == "reserve" or not begun:
            name = f"lease{number}{TOKENS if which == 5 else ''}"
            found = await limiter.reserve(holders, name, cost, 100.0)
            answers.append(found)
            if found.granted:
                begun.append((name, cost, found.now))
        elif operation == "again":
            lease, reserved, _ = begun[which % len(begun)]
            answers.append(await limiter.reserve(holders, lease, reserved, 100.0))
        elif operation == "renew":
            await limiter.renew(holders, begun[which % len(begun)][0], 100.0)
        else:
            lease, reserved, when = begun[which % len(begun)]
            await limiter.give_back(holders, lease, reserved, used, when)
            if operation == "twice":
                await limiter.give_back(holders, lease, reserved, used, when)
        answers.append(await limiter.remaining(holders))
    return answers


@settings(max_examples=tries(150), deadline=None)
@given(limits=st.lists(LIMITS, min_size=1, max_size=2), operations=OPERATIONS)
def test_memory_and_redis_agree_to_the_unit(redis_server: RedisServer, limits: list, operations: list) -> None:
    prefix = next(names)
    holders = [Holder(f"{prefix}:{number}", each) for number, each in enumerate(limits)]

    async def both() -> tuple[list, list]:
        clock = Clock()
        memory = await _answers(MemoryLimiter(clock), clock, holders, operations)
        clock = Clock()
        there = RedisLimiter(redis_server.url, clock=clock)
        try:
            return memory, await _answers(there, clock, holders, operations)
        finally:
            await there.close()

    memory, there = run_async(both())
    assert memory == there


class Bucket(RuleBasedStateMachine):
    """One holder in memory, beside sums of everything that was let in."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.limits = CallerLimits(tokens_per_minute=100, requests_at_once=3, money_per_day=Decimal("0.001"))
        self.holder = [Holder("one", self.limits)]
        self.limiter = MemoryLimiter(self.clock)
        self.running: dict[str, tuple[Cost, int, int]] = {}
        self.net = 0  # tokens taken and not given back, ever
        self.spent = {START // DAY: 0}

    @rule(tokens=st.integers(0, 150), micros=st.integers(0, 600))
    def begin(self, tokens: int, micros: int) -> None:
        lease, cost = f"lease{next(names)}", Cost(1, tokens, tokens, 0, micros)
        before = run_async(self.limiter.remaining(self.holder))
        found = run_async(self.limiter.reserve(self.holder, lease, cost, 120.0))
        today = self.clock.now // DAY
        room = {
            "tokens": tokens <= before[0].remaining,
            "requests_at_once": sum(expiry > self.clock.now for _, _, expiry in self.running.values()) < 3,
            "money": self.spent.get(today, 0) + micros <= 1_000,
        }
        assert found.granted == all(room.values())
        assert found.granted or not room[found.refused_by]
        if found.granted:
            self.running[lease] = (cost, found.now, found.now + 120_000_000)
            self.net += tokens
            self.spent[today] = self.spent.get(today, 0) + micros

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if not self.running:
            return
        lease = data.draw(st.sampled_from(sorted(self.running)))
        cost, begun, expiry = self.running.pop(lease)
        used = Cost(1, data.draw(st.integers(0, cost.tokens)), 0, 0, data.draw(st.integers(0, cost.micros)))
        run_async(self.limiter.give_back(self.holder, lease, cost, used, begun))
        if expiry > self.clock.now:
            self.net -= cost.tokens - used.tokens
            self.spent[begun // DAY] -= cost.micros - used.micros

    @rule(passed=st.integers(0, 200_000_000) | st.just(DAY))
    def wait(self, passed: int) -> None:
        self.clock.now += passed

    @invariant()
    def no_more_than_the_rate_and_one_minute_in_advance(self) -> None:
        assert self.net <= 100 + (self.clock.now - START) * 100 // SCALE
        (left,) = run_async(self.limiter.remaining(self.holder))
        assert 0 <= left.remaining <= 100 and 0 <= left.reset <= SCALE


TestBucket = Bucket.TestCase
TestBucket.settings = settings(max_examples=tries(40), stateful_step_count=25, deadline=None)


@settings(max_examples=tries(40), deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.data(), st.booleans())
def test_money_goes_back_to_the_day_on_which_its_call_began(
    first: int, second: int, data: st.DataObject, is_next_day: bool
) -> None:
    used = data.draw(st.integers(0, first))

    async def run() -> None:
        clock = Clock()
        limiter, holder = MemoryLimiter(clock), [Holder("one", CallerLimits(money_per_day=Decimal("0.001")))]
        begun = (await limiter.reserve(holder, "first", Cost(micros=first), 100.0)).now
        clock.now += 60 * SECOND if is_next_day else 0
        await limiter.reserve(holder, "second", Cost(micros=second), 100.0)
        await limiter.give_back(holder, "first", Cost(micros=first), Cost(micros=used), begun)
        left = 1_000 - second - (0 if is_next_day else used)
        assert not (await limiter.reserve(holder, "too much", Cost(micros=left + 1), 100.0)).granted
        assert (await limiter.reserve(holder, "the rest", Cost(micros=left), 100.0)).granted

    run_async(run())


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_refusal_says_after_what_time_it_is_granted(bucket: str) -> None:
    async def run() -> None:
        clock = Clock()
        limiter = MemoryLimiter(clock)
        holder = [Holder("one", CallerLimits.model_validate({f"{bucket}_per_minute": 7}))]
        cost = Cost(**{bucket: 3})
        assert [(await limiter.reserve(holder, str(n), cost, 10.0)).granted for n in range(3)] == [True, True, False]
        refused = await limiter.reserve(holder, "again", cost, 10.0)
        assert refused.refused_by == bucket and refused.holder == "one"
        clock.now += refused.wait - 1
        assert not (await limiter.reserve(holder, "again", cost, 10.0)).granted
        clock.now += 1
        assert (await limiter.reserve(holder, "again", cost, 10.0)).granted
        never = await limiter.reserve(holder, "large", Cost(**{bucket: 8}), 10.0)
        assert (never.granted, never.wait) == (False, -1)

    run_async(run())


def test_tokens_of_a_running_call_are_no_further_call(redis_server: RedisServer) -> None:
    async def run(limiter: Limiter, prefix: str) -> None:
        holder = [Holder(f"{prefix}one", CallerLimits(requests_at_once=1, tokens_per_minute=100))]
        granted = [
            (await limiter.reserve(holder, lease, cost, 10.0)).granted
            for lease, cost in (
                ("a", Cost(1)),
                (f"a{TOKENS}", Cost(0, 60)),
                (f"b{TOKENS}", Cost(0, 60)),
                ("b", Cost(1)),
            )
        ]
        assert granted == [True, True, False, False]
        await limiter.give_back(holder, "a", Cost(1), Cost(1), 0)
        assert (await limiter.reserve(holder, "b", Cost(1), 10.0)).granted
        await limiter.close()

    async def both() -> None:
        await run(MemoryLimiter(Clock()), "")
        await run(RedisLimiter(redis_server.url, f"{next(names)}", clock=Clock()), "")

    run_async(both())


def test_one_of_two_holders_refuses_and_none_pays(redis_server: RedisServer) -> None:
    async def run(limiter: Limiter, prefix: str) -> None:
        wide = Holder(f"{prefix}wide", CallerLimits(tokens_per_minute=1_000))
        narrow = Holder(f"{prefix}narrow", CallerLimits(tokens_per_minute=10))
        found = await limiter.reserve([wide, narrow], "one", Cost(1, 11), 10.0)
        assert (found.granted, found.holder) == (False, narrow.name)
        assert [each.remaining for each in await limiter.remaining([wide])] == [1_000]
        await limiter.close()

    run_async(run(MemoryLimiter(Clock()), ""))
    run_async(run(RedisLimiter(redis_server.url, f"{next(names)}", clock=Clock()), ""))


def test_of_64_at_once_as_many_are_admitted_as_there_is_room_for(redis_server: RedisServer) -> None:
    """Two gateways, with more calls than connections."""

    async def run() -> None:
        prefix = f"burst{next(names)}:"
        gateways = [RedisLimiter(redis_server.url, prefix, connections=4, timeout=limit(30.0)) for _ in range(2)]
        holder = [Holder("one", CallerLimits(requests_at_once=3))]
        calls = (gateways[n % 2].reserve(holder, f"lease{n}", Cost(1), 60.0) for n in range(64))
        found = await asyncio.gather(*calls)
        assert sum(each.granted for each in found) == 3
        granted = [(f"lease{n}", each) for n, each in enumerate(found) if each.granted]
        lease, begun = granted[0]
        await gateways[1].give_back(holder, lease, Cost(1), Cost(1), begun.now)
        assert (await gateways[0].reserve(holder, "more", Cost(1), 60.0)).granted
        assert not (await gateways[0].reserve(holder, "again", Cost(1), 60.0)).granted
        for each in gateways:
            await each.close()

    run_async(run())
