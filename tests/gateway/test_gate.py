"""The gateway as a whole: from a key to the entry of a call in the accounts."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

import workbench
from tests.economics.tables import table
from tests.event_loop import run_async
from tests.gateway.calls import ALICE, BOB, Models, answer, chat, numbers, outcome
from tests.gateway.redis_server import RedisServer
from tests.patience import limit
from workbench.errors import WorkbenchError
from workbench.files import write_atomically
from workbench.gateway.config import GatewayConfig
from workbench.gateway.gate import Gateway
from workbench.gateway.limits.headers import duration
from workbench.gateway.limits.limits import DAY, MICROS, MemoryLimiter
from workbench.gateway.limits.limits_redis import RedisLimiter
from workbench.prompt.conversation import Conversation
from workbench.serve.answers.pieces import Ended, Piece, Text, Used
from workbench.serve.call import Call, Caller
from workbench.serve.errors import ApiError
from workbench.serve.gate import Gate, Lease, Outcome


def run(use: Callable[[Gateway, Models], Coroutine[Any, Any, None]], **config: Any) -> None:
    async def whole() -> None:
        gateway, models = Gateway(config), Models()
        gateway.connect(models)
        try:
            await use(gateway, models)
        finally:
            await gateway.close()

    run_async(whole())


async def answered(
    gateway: Gate, call: Call, pieces: list[Piece] | None = None, ended: str = "finished"
) -> list[Piece]:
    """Carry a call out as the server does; return what left."""
    lease = await gateway.admit(call)
    whole = list(lease.answer) if lease.answer is not None else pieces or answer()
    left = [found for piece in whole for found in await lease.take([piece])]
    await lease.settle(outcome(whole, "kept" if lease.answer is not None else ended))
    return left


async def refused(gateway: Gate, call: Call) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await gateway.admit(call)
    return caught.value


def text(pieces: list[Piece]) -> str:
    return "".join(each.text for each in pieces if isinstance(each, Text))


def test_a_gateway_is_a_gate() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        gate: Gate = gateway
        lease: Lease = await gate.admit(chat())
        await lease.settle(outcome(answer()))
        assert (await gate.identify({})).scopes == {"*", "admin"} and list(gate.routes())

    run(use)


def test_a_caller_is_renewed_as_long_as_the_key_is_valid(tmp_path: Path) -> None:
    """Work without a client asks before each call: what changed since holds at once."""

    async def use(gateway: Gateway, models: Models) -> None:
        assert gateway.keys is not None
        key, secret = gateway.keys.create("alice", models=("demo",))
        caller = await gateway.identify({"x-api-key": secret})
        assert await gateway.renew(caller) == caller
        gateway.keys.rotate(key.id, hours=0)  # the text is another, the key the same
        assert await gateway.renew(caller) == caller
        gateway.keys.revoke(key.id)
        expired, _ = gateway.keys.create("alice", days=0)
        assert gateway.keys.active(expired.id) is None
        for each in (caller, Caller(expired.id, "alice"), Caller("unknown", "alice")):
            with pytest.raises(ApiError) as caught:
                await gateway.renew(each)
            assert caught.value.kind == "authentication_error"

    run(use, keys=str(tmp_path / "keys.json"))


def test_keys_of_both_protocols(tmp_path: Path) -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        assert gateway.keys is not None
        key, secret = gateway.keys.create("alice", models=("demo-draft",))
        caller = await gateway.identify({"authorization": f"Bearer {secret}"})
        assert caller == await gateway.identify({"x-api-key": secret})
        assert (caller.key, caller.tenant, caller.scopes) == (key.id, "alice", {"model:demo-draft"})
        assert len(caller.cache_salt) == 64
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": secret}, {"x-api-key": secret[:-1]}):
            with pytest.raises(ApiError) as caught:
                await gateway.identify(headers)
            assert caught.value.status == 401
        assert (await refused(gateway, chat(caller=caller))).status == 403
        await answered(gateway, chat(model="demo-draft", caller=caller))

    run(use, keys=str(tmp_path / "keys.json"))


@pytest.mark.parametrize(
    ("dialect", "prefix"), [("openai.chat", "x-ratelimit"), ("anthropic.messages", "anthropic-ratelimit")]
)
def test_limits_are_reserved_given_back_and_said_in_headers(dialect: str, prefix: str) -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        call = chat("x" * 10, dialect=dialect)
        prompt = sum(map(len, await models.prompt_ids(call)))
        lease = await gateway.admit(call)
        remaining = {name: value for name, value in lease.headers.items() if "remaining" in name}
        if dialect.startswith("openai"):
            assert remaining == {f"{prefix}-remaining-requests": "1", f"{prefix}-remaining-tokens": str(984 - prompt)}
            assert lease.headers["x-ratelimit-reset-requests"] == "30s"
        else:
            assert remaining[f"{prefix}-requests-remaining"] == "1"
            assert remaining[f"{prefix}-input-tokens-remaining"] == str(500 - prompt)
            assert lease.headers[f"{prefix}-requests-reset"].endswith("Z")
        used = Used(prompt_tokens=prompt, completion_tokens=3)
        await lease.settle(Outcome(used))
        tokens = next(each for each in gateway.meters() if each.name == "tenant: tokens a minute")
        assert prompt + 3 - 5 <= tokens.used <= prompt + 3  # some are filled up again while the test runs
        await answered(gateway, chat(dialect=dialect))
        error = await refused(gateway, chat(dialect=dialect))
        assert (error.status, error.kind) == (429, "rate_limit_error") and "requests a minute" in error.message
        assert 28 <= int(error.headers["retry-after"]) <= 30
        assert error.headers[f"{prefix}-limit-requests" if dialect[0] == "o" else f"{prefix}-requests-limit"] == "2"

    limits = {"requests_per_minute": 2, "tokens_per_minute": 1000, "input_tokens_per_minute": 500}
    run(use, limits={"each_key": limits})


def test_calls_at_once_and_calls_that_are_too_large() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        first = await gateway.admit(chat())
        error = await refused(gateway, chat())
        assert error.status == 429 and error.headers["retry-after"] == "1" and "at once" in error.message
        await first.settle(outcome(answer()))
        await first.settle(outcome(answer()))  # a second time has no effect
        second = await gateway.admit(chat())
        await second.settle(Outcome(Used(), "failed"))
        error = await refused(gateway, chat(sampling={"max_tokens": 10_000}))
        assert error.headers["x-should-retry"] == "false" and "make it smaller" in error.message
        gateway.accounts.flush()
        assert sum(row.calls for row in gateway.accounts.sums(())) == 2

    run(use, limits={"tenants": {"tenant": {"requests_at_once": 1, "tokens_per_minute": 9_000}}})


def test_a_budget_is_reserved_at_the_dearest_and_charged_exactly(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(yaml.safe_dump(table().model_dump(mode="json")))

    async def use(gateway: Gateway, models: Models) -> None:
        for _ in range(3):
            await answered(gateway, chat("x", sampling={"max_tokens": 100}), answer("y" * 100, prompt_tokens=0))
        error = await refused(gateway, chat("x", sampling={"max_tokens": 100}))
        assert (error.status, error.kind) == (402, "billing_error") and "budget of the day" in error.message
        gateway.accounts.flush()
        (row,) = gateway.accounts.sums(("key",))
        assert row.cost == Fraction(15 * 300, 1_000_000)

    run(use, limits={"each_key": {"money_per_day": "0.005"}}, accounting={"prices": str(file)})


@pytest.mark.parametrize(
    "limits",
    [
        {"each_key": {"money_per_day": 1}},
        {"tenants": {"a": {"money_per_day": 1}}},
        {"keys": {"a": {"money_per_day": 1}}},
    ],
)
def test_a_limit_of_money_wants_prices_of_all_models(limits: dict[str, Any]) -> None:
    names = Models().names()
    for prices, missing in (
        ({}, "demo-draft, demo, demo-chat, which"),
        ({"model_prices": {"demo": "article-a", "demo-chat": "article-a"}}, "for demo-draft, which"),
        ({"model_prices": dict.fromkeys(names, "article-a")}, ""),
        ({"prices": "article-a"}, ""),
    ):
        gateway = Gateway({"limits": limits, "accounting": prices})
        if missing:
            with pytest.raises(WorkbenchError, match=f"money_per_day counts nothing .*{missing}"):
                gateway.connect(Models())
        else:
            gateway.connect(Models())
        gateway.accounts.close()


def test_moderation_of_prompts_and_answers() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        call = chat("Where is the TREASURE?")
        error = await refused(gateway, call)
        assert (error.status, error.code) == (400, "content_filter") and call.notes["moderation"] == "input: pirates"
        call = chat("Hi")
        left = await answered(gateway, call, answer("the treasure is"), "stopped")
        assert text(left) == "the " and left[-2:-1] == [Ended(0, "content_filter")]
        assert call.notes["moderation"] == "output: pirates"
        assert text(await answered(gateway, chat("Hi"), answer("no"))) == "no"  # the stopped one was not kept
        assert text(await answered(gateway, chat("Hi"), answer("else"))) == "no"
        assert (await gateway.limiter.remaining(gateway.config.limits.holders(call.caller)))[0].remaining >= 5

    rule = {"name": "pirates", "terms": ["treasure"]}
    limits = {"each_key": {"requests_per_minute": 10}}
    run(use, moderation={"rules": [rule]}, answers={}, limits=limits)


def test_token_ids_are_not_a_way_round_moderation() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        for text, is_refused in (("a Treasure", True), ("a map", False)):
            ids = tuple(map(ord, text))
            call = Call("cmpl-1", "openai.completions", "demo", ("a text", ids), chat().sampling, caller=ALICE)
            if is_refused:
                assert (await refused(gateway, call)).code == "content_filter"
            else:
                await answered(gateway, call, answer("x", choices=2))

    run(use, moderation={"rules": [{"name": "pirates", "terms": ["treasure"]}]})


TOOL = {"type": "object", "properties": {"at": {"type": "string", "enum": ["here", "there"]}}}


@pytest.mark.parametrize(
    "values",
    [
        {"tools": [{"name": "treasure", "parameters": TOOL}]},
        {"tools": [{"name": "look", "description": "Find the treasure.", "parameters": TOOL}]},
        {"tools": [{"name": "look", "parameters": TOOL | {"properties": {"treasure": {"type": "string"}}}}]},
        {"tools": [{"name": "look", "parameters": TOOL | {"properties": {"at": {"enum": ["treasure"]}}}}]},
        {"template_arguments": {"persona": ["pirate", {"wants": "the treasure"}]}},
        {"documents": [{"title": "A map", "text": "no", "source": "treasure island"}]},
        {"turns": [
            "Hi",
            {"role": "assistant", "content": "", "tool_calls": [{"name": "dig", "arguments": {"for": "treasure"}}]},
            {"role": "tool", "name": "dig", "content": "no"},
        ]},
    ],
)  # fmt: skip
def test_no_part_of_a_conversation_is_left_unmoderated(values: dict[str, Any]) -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        call = replace(chat(), prompts=(Conversation(**({"turns": ["Hi"]} | values)),))
        assert (await refused(gateway, call)).code == "content_filter"

    run(use, moderation={"rules": [{"name": "pirates", "terms": ["treasure"]}]})


def test_kept_answers_cost_nothing_and_are_accounted_as_kept() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        first, second = chat("Hi"), chat("Hi", dialect="anthropic.messages")
        assert text(await answered(gateway, first, answer("one"))) == "one"
        left = await answered(gateway, second, answer("two"))
        assert text(left) == "one" and second.notes["answers"] == "exact"
        assert isinstance(left[-1], Used) and left[-1].from_kept_answer
        assert text(await answered(gateway, chat("Hi", caller=BOB), answer("two"))) == "two"
        await answered(gateway, chat("Ho"), answer("cut")[:-2] + [Ended(0, "cancelled"), Used()], "cancelled")
        assert text(await answered(gateway, chat("Ho"), answer("whole"))) == "whole"
        gateway.accounts.flush()
        rows = {row.group: row for row in gateway.accounts.sums(("ended",))}
        assert rows[("kept",)].usage.prompt == 0 and rows[("kept",)].kept == 23 and rows[("kept",)].cost == 0
        assert rows[("finished",)].calls == 3 and rows[("cancelled",)].calls == 1

    run(use, answers={}, accounting={"prices": "article-a"})


def test_the_router_is_wired_in() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        models.away["demo-chat"] = "stopped"
        call = chat("Hi", "auto")
        lease = await gateway.admit(call)
        assert lease.call.model == "demo" and lease.call.notes is call.notes
        assert call.notes["router"]["reasons"][-1] == "fallback: demo"
        await lease.settle(outcome(answer()))
        gateway.accounts.flush()
        assert [row.group for row in gateway.accounts.sums(("model",))] == [("demo",)]

    rule = {"to": "demo-chat", "models": ["auto"]}
    run(use, router={"rules": [rule], "fallbacks": {"demo-chat": ["demo"]}})


def test_a_broken_file_of_keys_lets_no_caller_in_and_says_nothing_of_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"

    async def use(gateway: Gateway, models: Models) -> None:
        assert gateway.keys is not None
        key, text = gateway.keys.create("alice")
        caller = await gateway.identify({"authorization": f"Bearer {text}"})
        whole = file.read_text()
        for broken in ("{", '{"keys": 5}'):
            write_atomically(file, lambda to, broken=broken: to.write(broken.encode()))
            for ask in (gateway.identify({"x-api-key": text}), gateway.renew(caller)):
                with pytest.raises(ApiError) as caught:
                    await ask
                assert caught.value.status == 503 and str(tmp_path) not in caught.value.message
        assert str(file) in caplog.text
        write_atomically(file, lambda to: to.write(whole.encode()))
        assert await gateway.identify({"x-api-key": text}) == caller

    run(use, keys=str(file))


def test_who_may_not_ask_now_has_nothing_classified() -> None:
    classified: list[str] = []

    @workbench.register("test-counts-classified")
    def classify(text: str) -> float:
        classified.append(text)
        return 0.0

    async def use(gateway: Gateway, models: Models) -> None:
        await answered(gateway, chat("one", "auto"))
        assert (await refused(gateway, chat("two", "auto"))).status == 429
        assert classified == ["one"]

    learned = {
        "models": ["auto"],
        "cheap": "demo",
        "strong": "demo-chat",
        "classifier": {"path": "test-counts-classified"},
    }
    run(use, router={"learned": learned}, limits={"each_key": {"requests_per_minute": 1}})


def test_a_call_that_no_model_takes_now_costs_no_request() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        models.away["demo"] = "stopped"
        assert (await refused(gateway, chat())).status == 503
        models.away.clear()
        await answered(gateway, chat())
        assert (await refused(gateway, chat())).status == 429

    run(use, limits={"each_key": {"requests_per_minute": 1}})


def test_calls_are_refused_while_too_many_wait_to_be_accounted_for(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"

    async def use(gateway: Gateway, models: Models) -> None:
        with sqlite3.connect(file) as connection:
            connection.execute("alter table calls rename to away")
        for _ in range(3):
            await answered(gateway, chat())
        error = await refused(gateway, chat())
        assert error.status == 503 and error.code == "accounts_unavailable" and "retry-after" in error.headers
        with sqlite3.connect(file) as connection:
            connection.execute("alter table away rename to calls")
        gateway.accounts.flush()
        await answered(gateway, chat())
        gateway.accounts.flush()
        assert gateway.accounts.sums(())[0].calls == 4

    run(use, accounting={"file": str(file), "max_unwritten": 3})


def test_what_was_reserved_is_given_back_when_admission_fails() -> None:
    @workbench.register("test-fails")
    def fails(text: str) -> str:
        raise RuntimeError("no model of morals")

    async def use(gateway: Gateway, models: Models) -> None:
        for _ in range(3):
            error = await refused(gateway, chat())
            assert (error.status, error.code) == (503, "moderation_unavailable")
        holders = gateway.config.limits.holders(chat().caller)
        assert (await gateway.limiter.remaining(holders))[0].remaining == 1_000

    limits = {"each_key": {"tokens_per_minute": 1_000, "requests_at_once": 1}}
    run(use, moderation={"classifier": {"path": "test-fails"}}, limits=limits)


@pytest.mark.parametrize("limits", [{"requests_per_minute": 2}, {"requests_at_once": 2}])
def test_who_may_not_ask_has_nothing_tokenized(limits: dict[str, Any]) -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        leases = [await gateway.admit(chat()) for _ in range(2)]
        assert models.tokenized == 2
        for _ in range(3):
            assert (await refused(gateway, chat())).status == 429
        assert models.tokenized == 2
        for each in leases:
            await each.settle(outcome(answer()))

    run(use, limits={"each_key": limits})


def test_tokens_that_are_refused_take_nothing_of_any_limit() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        slow_limiter(gateway).answers.set()  # its time stands still
        holders = gateway.config.limits.holders(ALICE)
        before = await gateway.limiter.remaining(holders)
        for _ in range(3):
            error = await refused(gateway, chat(sampling={"max_tokens": 900}))
            assert error.status == 429 and "tokens a minute" in error.message
            assert await gateway.limiter.remaining(holders) == before
        lease = await gateway.admit(chat())
        assert (await refused(gateway, chat())).status == 429
        await lease.settle(Outcome(Used()))
        left = {each.bucket: each.remaining for each in await gateway.limiter.remaining(holders)}
        assert left == {"requests": 4, "tokens": 500}

    run(use, limits={"each_key": {"requests_per_minute": 5, "tokens_per_minute": 500, "requests_at_once": 1}})


def test_a_call_without_max_tokens_reserves_what_the_context_has_left() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        slow_limiter(gateway).answers.set()
        holders = gateway.config.limits.holders(ALICE)
        for context, reserved in ((1_000, 1_000), (200_000, None)):
            models.context = context
            call = chat("x" * 50, sampling={"max_tokens": context}, has_max_tokens=False)
            prompt = sum(map(len, await models.prompt_ids(call)))
            lease = await gateway.admit(call)
            assert lease.call.sampling.max_tokens == min(context, 131_072)
            left = (await gateway.limiter.remaining(holders))[0].remaining
            assert 500_000 - left == (reserved or prompt + 131_072)
            await lease.settle(Outcome(Used()))
        assert (await refused(gateway, chat(sampling={"max_tokens": 200_000}))).status == 400

    run(use, limits={"each_key": {"tokens_per_minute": 500_000}})


class SlowLimiter(MemoryLimiter):
    """A limiter whose answer comes when it is let; its answer may be lost. It has a clock of its own."""

    def __init__(self) -> None:
        self.now = 20_700 * DAY
        super().__init__(lambda: self.now)
        self.asked, self.answers, self.renewed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def reserve(self, holders: Any, lease: str, cost: Any, seconds: float) -> Any:
        found = await super().reserve(holders, lease, cost, seconds)
        self.asked.set()
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return found

    async def renew(self, holders: Any, lease: str, seconds: float) -> None:
        await super().renew(holders, lease, seconds)
        self.renewed.set()


def slow_limiter(gateway: Gateway) -> SlowLimiter:
    gateway.limiter = gateway.reservations.limiter = limiter = SlowLimiter()
    return limiter


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


def test_the_config_is_one_value_of_yaml() -> None:
    text = """
    keys: keys.json
    limits: {each_tenant: {requests_at_once: 4, money_per_day: 2.50}}
    moderation: {rules: [{name: pirates, terms: [treasure]}]}
    answers: {ttl_seconds: 60}
    accounting: {file: usage.sqlite, prices: article-a}
    """
    config = GatewayConfig.from_values(yaml.safe_load(text))
    assert GatewayConfig.from_values(config.model_dump(mode="json")) == config
    with pytest.raises(WorkbenchError, match="gateway: limits.each_key.request_per_minute: unknown key; did you mean"):
        GatewayConfig.from_values({"limits": {"each_key": {"request_per_minute": 1}}})


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "0ms"), (1, "1ms"), (12_000, "12ms"), (1_000_000, "1s"), (360_000_000, "6m0s"), (3_661_000_000, "1h1m1s")],
)
def test_durations_are_those_of_the_protocol(micros: int, text: str) -> None:
    assert duration(micros) == text
