"""Admission: what a call reserves and is charged, and what a refused one leaves behind."""

from __future__ import annotations

import math
import sqlite3
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

import workbench
from tests.economics.tables import table
from tests.gateway.calls import ALICE, Json, Models, answer, chat, outcome
from tests.gateway.gates import answered, refused, run, slow_limiter
from workbench.errors import WorkbenchError
from workbench.gateway.gate import Gateway
from workbench.gateway.limits.headers import duration, limit_headers, refusal
from workbench.gateway.limits.limits import MICROS, MONEY, Cost, Remaining, Reservation
from workbench.serve.answers.pieces import Used
from workbench.serve.call import Breakpoint
from workbench.serve.gate import Outcome


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

    async def dear(gateway: Gateway, models: Models) -> None:
        """Of a budget that nothing was spent of, too."""
        error = await refused(gateway, chat("x", sampling={"max_tokens": 10_000}))
        assert "may cost more than the key's whole budget of the day; make it smaller" in error.message
        assert error.status == 402 and "spent" not in error.message and error.headers["x-should-retry"] == "false"

    run(dear, limits={"each_key": {"money_per_day": "0.005"}}, accounting={"prices": str(file)})
    run(use, limits={"each_key": {"money_per_day": "0.005"}}, accounting={"prices": str(file)})


@pytest.mark.parametrize(
    "limits",
    [
        {"each_key": {"money_per_day": 1}},
        {"tenants": {"a": {"money_per_day": 1}}},
        {"keys": {"a": {"money_per_day": 1}}},
    ],
)
def test_a_limit_of_money_wants_prices_of_all_models(limits: Json) -> None:
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


def test_who_may_not_ask_now_has_nothing_classified() -> None:
    classified: list[str] = []

    @workbench.register("test-counts-classified")
    def choose(text: str) -> str:
        classified.append(text)
        return "demo"

    async def use(gateway: Gateway, models: Models) -> None:
        await answered(gateway, chat("one", "auto"))
        assert (await refused(gateway, chat("two", "auto"))).status == 429
        assert classified == ["one"]

    choice = {"models": ["auto"], "function": {"path": "test-counts-classified"}}
    run(use, router={"choice": choice}, limits={"each_key": {"requests_per_minute": 1}})


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
        gateway.accounts.flush()
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
def test_who_may_not_ask_has_nothing_tokenized(limits: Json) -> None:
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


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "0ms"), (1, "1ms"), (12_000, "12ms"), (1_000_000, "1s"), (360_000_000, "6m0s"), (3_661_000_000, "1h1m1s")],
)
def test_durations_are_those_of_the_protocol(micros: int, text: str) -> None:
    assert duration(micros) == text


@pytest.mark.parametrize(("micros", "seconds"), [(1, 1), (999_999, 1), (1_000_000, 1), (1_000_001, 2)])
def test_no_header_names_a_time_before_the_limit_is_there_again(micros: int, seconds: int) -> None:
    now, left = 86_400 * MICROS, (Remaining("tokens", 5, 4, micros),)
    for by in ("tokens", MONEY):
        headers = refusal("openai.chat", Reservation(False, now, by, "key:a", micros, left)).headers
        assert headers["retry-after"] == str(seconds)
        assert headers["retry-after-ms"] == str(-(-micros // 1_000))
    written = limit_headers("anthropic.messages", left, now)["anthropic-ratelimit-tokens-reset"]
    assert written == f"1970-01-02T00:00:0{seconds}Z"


def test_money_is_reserved_at_the_dearest_kind_and_counted_to_the_last_part_of_a_micro_unit(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    prices = table("0.4", "1", "0.4", "0", hour="3")
    file.write_text(yaml.safe_dump(prices.model_dump(mode="json")))

    async def use(gateway: Gateway, models: Models) -> None:
        slow_limiter(gateway).answers.set()
        for breakpoints, dearest in (((), "0.4"), ((Breakpoint("system"),), "3")):
            call = chat("x" * 11, breakpoints=breakpoints)
            tokens = sum(map(len, await models.prompt_ids(call)))
            lease = await gateway.admit(call)
            assert lease.tokens.micros == math.ceil(tokens * Fraction(dearest))
            await lease.settle(Outcome(Used(prompt_tokens=1)))
        (holder,) = gateway.config.limits.holders(ALICE)
        spent = Cost(micros=10_000 - 2)
        assert (await gateway.limiter.reserve([holder], "rest", spent, 10.0)).granted, "0.4 micro-units are 1"
        assert not (await gateway.limiter.reserve([holder], "more", Cost(micros=1), 10.0)).granted

    run(use, limits={"each_key": {"money_per_day": "0.01"}}, accounting={"prices": str(file)})
