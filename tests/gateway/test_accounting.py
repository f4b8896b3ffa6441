"""Accounts: the sums are those of the calls, to the token and to the fraction of a cent."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.economics.tables import PRICES, table
from tests.gateway.calls import chat
from tests.helpers.command_line import answer
from tests.patience import limit, until
from tests.thorough import tries
from workbench.economics.prices import Usage, total_usage
from workbench.errors import WorkbenchError
from workbench.gateway import accounting
from workbench.gateway.accounting import (
    AccountEntry,
    AccountingConfig,
    Accounts,
    PriceBook,
    UsageRow,
    account_entry,
    open_accounts,
    priced_usage,
    sum_calls,
)
from workbench.serve.answers.pieces import Used
from workbench.serve.call import Caller
from workbench.serve.gate import Outcome

TOKENS = st.integers(0, 10_000)


@st.composite
def used(draw: st.DrawFn) -> Used:
    cached, five, hour, rest = (draw(TOKENS) for _ in range(4))
    by_ttl = tuple((life, count) for life, count in ((300.0, five), (3600.0, hour)) if count)
    prompt = cached + five + hour + rest
    return Used(0, prompt, draw(TOKENS), cached, five + hour, 0, cache_written_by_ttl=by_ttl)


ENDS = st.sampled_from(["finished", "cancelled", "stopped", "failed", "kept"])


class Traffic(RuleBasedStateMachine):
    """Random calls under random prices, beside their plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = Accounts()
        self.entries: list[tuple[AccountEntry, Fraction]] = []
        self.prices = table()

    @rule(used=used(), ended=ENDS, key=st.sampled_from("ab"), model=st.sampled_from(["demo", "demo-chat"]),
          now=st.integers(0, 4 * 86_400), times=st.sampled_from([1, 1, 5]))  # fmt: skip
    def calls(self, used: Used, ended: str, key: str, model: str, now: int, times: int) -> None:
        for _ in range(times):
            self.call(used, ended, key, model, now)

    def call(self, used: Used, ended: str, key: str, model: str, now: int) -> None:
        call = replace(chat("Hi", model), caller=Caller(key, f"tenant {key}"))
        entry = account_entry(call, "auto", Outcome(used, ended), self.prices, float(now))
        self.accounts.add(entry, self.prices)
        whole = 0 if ended == "kept" else used.prompt_tokens + used.completion_tokens
        assert entry.usage.prompt + entry.usage.output == whole
        assert entry.kept == (used.prompt_tokens + used.completion_tokens if ended == "kept" else 0)
        self.entries.append((entry, self.prices.cost(entry.usage)))

    @rule(prices=PRICES)
    def other_prices(self, prices) -> None:
        self.prices = prices

    @invariant()
    def sums_are_those_of_the_calls(self) -> None:
        self.accounts.flush()
        for by in ((), ("key",), ("day", "model"), ("ended", "tenant")):
            rows = {row.group: row for row in self.accounts.sums(by)}
            groups: dict[tuple[str, ...], list[tuple[AccountEntry, Fraction]]] = {}
            for entry, cost in self.entries:
                groups.setdefault(tuple(getattr(entry, name) for name in by), []).append((entry, cost))
            assert rows.keys() == groups.keys()
            for group, entries in groups.items():
                row = rows[group]
                assert row.calls == len(entries) and row.cost == sum(cost for _, cost in entries)
                assert row.usage == total_usage(entry.usage for entry, _ in entries)
                assert row.kept == sum(entry.kept for entry, _ in entries)
            paged: list[UsageRow] = []
            after: tuple[str, ...] = ()
            while page := self.accounts.sums(by, limit=1, after=after):
                paged, after = paged + page, page[-1].group
                if not by:
                    break
            assert paged == list(rows.values())

    def teardown(self) -> None:
        self.accounts.close()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=tries(15), stateful_step_count=12, deadline=None)


@given(used(), PRICES)
def test_each_token_is_priced_once(used: Used, prices) -> None:
    usage = priced_usage(used, prices)
    assert usage.prompt == used.prompt_tokens and usage.output == used.completion_tokens
    prices.cost(usage)
    plain = prices.model_copy(update={"cache_write_5m": None, "cache_write_1h": None, "cache_read": None})
    assert priced_usage(used, plain) == Usage(input=used.prompt_tokens, output=used.completion_tokens)
    written = dict(used.cache_written_by_ttl)
    assert (usage.cache_write_5m, usage.cache_write_1h) == (written.get(300.0, 0), written.get(3600.0, 0))
    one_write = prices.model_copy(update={"cache_write_1h": None})
    assert one_write.cost(priced_usage(used, one_write)) >= 0


def test_accounts_outlive_their_process_and_are_read_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "inner" / "usage.sqlite"
    accounts = Accounts(file)
    entry = account_entry(chat(), "demo", Outcome(Used(0, 100, 10)), table(), 0.0)
    accounts.add(entry, table())
    accounts.flush()
    with open_accounts(file) as connection:
        (row,) = sum_calls(connection, ("day", "key"))
    assert row.group == ("1970-01-01", "key") and row.cost == Fraction(100 * 3 + 10 * 15, 1_000_000)
    accounts.add(entry, None)
    accounts.close()
    again = Accounts(file)
    assert again.sums(("day",))[0].calls == 2 and again.sums(("day",), since="1970-01-02") == []
    with pytest.raises(WorkbenchError, match="did you mean 'day'"):
        again.sums(("days",))
    again.close()


def test_the_command_sums_the_calls_of_the_key_the_tenant_and_the_days_that_it_is_given(tmp_path: Path) -> None:
    accounts = Accounts(file := tmp_path / "usage.sqlite")
    days = "1970-01-01", "1970-01-02"
    made = [*itertools.product("ab", "abc", days)]
    for key, tenant, day in made:
        call, now = replace(chat(), caller=Caller(key, tenant)), 86_400.0 * days.index(day)
        accounts.add(account_entry(call, "demo", Outcome(Used(0, 1, 1)), None, now), None)
    accounts.close()
    for key, tenant, since in itertools.product(("", "b"), ("", "c", "d"), ("", days[1])):
        rows = answer("usage --by key,tenant,day --file", file, "--key", key, "--tenant", tenant, "--since", since)
        found = [(row["key"], row["tenant"], row["day"]) for row in rows]
        assert found == [each for each in made if key in ("", each[0]) and tenant in ("", each[1]) and each[2] >= since]


def test_what_cannot_be_written_waits_until_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again also where no further call comes, in parts; what is left at the end is said to be lost."""
    monkeypatch.setattr(accounting, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(accounting, "MAX_BATCH", 4)
    file, said = tmp_path / "usage.sqlite", []
    accounts = Accounts(file, said.append)
    entry = account_entry(chat(), "demo", Outcome(Used(0, 100, 10)), None, 0.0)
    with sqlite3.connect(file) as connection:
        connection.execute("alter table calls rename to away")
    for _ in range(10):
        accounts.add(entry, None)
    accounts.flush()
    assert "calls are not written yet" in said[-1] and accounts.num_unwritten == 10
    with sqlite3.connect(file) as connection:
        connection.execute("alter table away rename to calls")
    until(lambda: accounts.num_unwritten == 0)
    assert accounts.sums(())[0].calls == 10
    with sqlite3.connect(file) as connection:
        connection.execute("alter table calls rename to away")
    accounts.add(entry, None)
    accounts.close()
    assert "1 calls are lost" in said[-1]


def test_a_flush_ends_though_calls_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts, write = Accounts(), accounting._write
    entry = account_entry(chat(), "demo", Outcome(Used(0, 100, 10)), None, 0.0)

    def write_and_add(*given: Any) -> None:
        write(*given)
        accounts.add(entry, None)

    monkeypatch.setattr(accounting, "_write", write_and_add)
    accounts.add(entry, None)
    flush = threading.Thread(target=accounts.flush, daemon=True)
    flush.start()
    flush.join(limit(10))
    monkeypatch.setattr(accounting, "_write", write)
    accounts.close()
    assert not flush.is_alive()


def test_files_that_are_no_accounts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("no database, but a text that is long enough for one" * 20)
    with pytest.raises(WorkbenchError, match="cannot be used"):
        Accounts(tmp_path / "other")
    with pytest.raises(WorkbenchError, match="there is no such file"), open_accounts(tmp_path / "missing"):
        pass
    with pytest.raises(WorkbenchError, match="holds no accounts"), open_accounts(tmp_path / "other"):
        pass


def test_prices_by_model() -> None:
    book = PriceBook(AccountingConfig(prices="article-a", model_prices={"demo": "article-e-2x"}))
    assert book.of("demo") != book.of("demo-chat") and book.currency == "USD"
    assert PriceBook(AccountingConfig()).cost("demo", Usage(input=5)) == 0
