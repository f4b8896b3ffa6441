"""Reservations: given back where a caller leaves, renewed while calls run, shared by several gateways."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.economics.tables import table
from tests.event_loop import run_async
from tests.gateway.calls import ALICE, Models, answer, chat, numbers, outcome
from tests.gateway.gates import refused, run, slow_limiter
from tests.gateway.redis_server import RedisServer
from tests.patience import limit
from workbench.gateway.gate import Gateway
from workbench.gateway.limits.limits import DAY, MICROS
from workbench.gateway.limits.limits_redis import RedisLimiter
from workbench.serve.answers.pieces import Used
from workbench.serve.errors import ApiError
from workbench.serve.gate import Lease, Outcome

ONE = {"each_key": {"requests_at_once": 1, "tokens_per_minute": 9_000}}


@pytest.mark.parametrize("error", [None, TimeoutError("the answer was lost")])
def test_a_reservation_whose_caller_left_is_given_back(error: Exception | None) -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        limiter = slow_limiter(gateway)
        admission = asyncio.create_task(gateway.admit(chat()))
        await limiter.asked.wait()
        if error is None:
            admission.cancel()
            with pytest.raises(asyncio.CancelledError):
                await admission
            limiter.answers.set()
        else:
            limiter.error = error
            limiter.answers.set()
            with pytest.raises(ApiError, match="cannot be checked now"):
                await admission
            limiter.error = None
        while gateway.reservations._background:
            await asyncio.sleep(0)
        holders = gateway.config.limits.holders(ALICE)
        assert (await limiter.remaining(holders))[0].remaining == 9_000
        await (await gateway.admit(chat())).settle(outcome(answer()))

    run(use, limits=ONE)


def test_a_call_that_outlasts_its_lease_keeps_its_place() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        limiter = slow_limiter(gateway)
        limiter.answers.set()
        lease = await gateway.admit(chat())
        for _ in range(4):
            limiter.now += 200 * MICROS
            await gateway.reservations.renew()
            assert (await refused(gateway, chat())).status == 429
        await lease.settle(Outcome(Used(prompt_tokens=1, completion_tokens=1)))
        other = await gateway.admit(chat())
        limiter.now += 301 * MICROS  # its gateway has died, and renews nothing
        assert await gateway.admit(chat())
        await other.settle(outcome(answer()))

    run(use, limits=ONE | {"lease_seconds": 300})


def test_leases_are_renewed_while_calls_run() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        limiter = slow_limiter(gateway)
        limiter.answers.set()
        lease = await gateway.admit(chat())
        await limiter.renewed.wait()
        await lease.settle(outcome(answer()))

    run(use, limits=ONE | {"lease_seconds": 0.01})


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"requests_at_once": 7}, 7), ({"requests_per_minute": 11}, 11), ({"money_per_day": "0.0018"}, 5)],
)
def test_two_gateways_admit_together_exactly_what_the_limit_allows(
    redis_server: RedisServer, tmp_path: Path, limits: dict[str, Any], most: int
) -> None:
    """Of 40 calls at once, by two gateways that share the limits in one Redis server."""
    file = tmp_path / "prices.yaml"
    file.write_text(yaml.safe_dump(table().model_dump(mode="json")))
    tenant = f"tenant {next(numbers)}"

    async def whole() -> None:
        config = {
            "limits": {"redis": redis_server.url, "each_tenant": limits},
            "accounting": {"prices": str(file)},
        }
        gateways = [Gateway(config) for _ in range(2)]
        for each in gateways:
            limiter = RedisLimiter(redis_server.url, timeout=limit(30), clock=lambda: 20_700 * DAY)
            each.limiter = each.reservations.limiter = limiter
            each.connect(Models())
        caller = replace(ALICE, tenant=tenant)

        async def ask(number: int) -> Lease | ApiError:
            try:
                return await gateways[number % 2].admit(chat("", caller=caller))
            except ApiError as error:
                return error

        found = await asyncio.gather(*(ask(number) for number in range(40)))
        leases = [each for each in found if not isinstance(each, ApiError)]
        assert len(leases) == most
        assert {each.status for each in found if isinstance(each, ApiError)} <= {402, 429}
        for each in leases:
            await each.settle(Outcome(Used()))
        again = await ask(1)  # what was not used is there again, but for requests that were made
        assert isinstance(again, ApiError) == ("requests_per_minute" in limits)
        if not isinstance(again, ApiError):
            await again.settle(Outcome(Used()))
        for gateway in gateways:
            await gateway.close()

    run_async(whole())


@pytest.mark.parametrize("on_failure", ["closed", "open"])
def test_redis_dies_and_returns_under_load(own_redis: RedisServer, on_failure: str) -> None:
    """No call hangs or fails otherwise than said, and calls are limited again when it is back: to 5 at once."""
    draw = random.Random(1)

    async def use(gateway: Gateway, models: Models) -> None:
        counts = {"admitted": 0, "limited": 0, "refused": 0, "uncounted": 0}
        running: set[int] = set()  # admitted since Redis was last started, which remembers nothing
        stop = False

        async def client() -> None:
            while not stop:
                call = chat()
                try:
                    lease = await gateway.admit(call)
                except ApiError as error:
                    assert error.status in (429, 503) and error.headers["retry-after"] == "1"
                    counts["refused" if error.status == 503 else "limited"] += 1
                else:
                    is_counted = lease.begun is not None
                    if is_counted:
                        running.add(id(lease))
                        assert len(running) <= 5
                    await asyncio.sleep(draw.random() / 200)
                    running.discard(id(lease))
                    await lease.settle(outcome(answer()))
                    counts["admitted" if is_counted else "uncounted"] += 1
                await asyncio.sleep(0)

        async def until(name: str, more: int) -> None:
            goal = counts[name] + more
            while counts[name] < goal:
                await asyncio.sleep(0.01)

        async with asyncio.timeout(limit(60)), asyncio.TaskGroup() as group:
            for _ in range(24):
                group.create_task(client())
            for _ in range(2):
                await until("admitted", 30)
                own_redis.kill()
                await until("refused" if on_failure == "closed" else "uncounted", 30)
                running.clear()
                own_redis.start()
                await until("admitted", 30)
                await until("limited", 30)
            stop = True
        assert counts["uncounted" if on_failure == "closed" else "refused"] == 0

    each_key = {"requests_per_minute": 1_000_000, "requests_at_once": 5}
    run(use, limits={"redis": own_redis.url, "on_failure": on_failure, "each_key": each_key})
