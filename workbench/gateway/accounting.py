"""Record every call for accounting: tokens by kind, and their cost at the prices of the day.

Calls are rows of an SQLite file, written by one thread; sums are computed from them, exactly.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sqlite3
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.economics.prices import KINDS, Prices, Usage, load_prices, total_usage
from workbench.errors import WorkbenchError, nearest
from workbench.serve.answers.pieces import Used
from workbench.serve.call import Call
from workbench.serve.gate import Outcome
from workbench.settings import Count, Settings

FIVE_MINUTES = 300.0  # seconds: a cache entry with a longer lifetime is priced as one hour
GROUPS = ("day", "key", "tenant", "model", "dialect", "ended", "id")
MAX_BATCH = 256  # maximum calls written in one transaction
RETRY_SECONDS = 1.0  # seconds until a failed write is tried again
SCHEMA = """
create table if not exists prices (hash text primary key, content text not null);
create table if not exists calls (
  id text not null, time real not null, day text not null, key text not null, tenant text not null,
  model text not null, asked text not null, dialect text not null, ended text not null, prices text,
  input integer not null, cache_write_5m integer not null, cache_write_1h integer not null,
  cache_read integer not null, output integer not null, thinking integer not null, kept integer not null,
  seconds real not null, first_token_seconds real
);
create index if not exists calls_by_day on calls (day);
"""


class AccountingConfig(Settings):
    """Account for calls in `file`, with price tables by model."""

    file: Path | None = None  # file of usage records; None: a temporary file, deleted with the server
    max_unwritten: Count = 10_000  # maximum calls that wait for a full or locked disk; above it, new calls are refused
    prices: str | None = None  # a shipped price table or a YAML file; None: tokens are counted, and cost nothing
    model_prices: dict[str, str] = {}  # price table of each named model, in place of `prices`


@dataclass(frozen=True)
class AccountEntry:
    """One call in the accounts. `kept` is the number of tokens of a response from the cache; they are not in `usage`
    and cost nothing.
    """

    id: str
    time: float  # seconds since 1970
    key: str
    tenant: str
    model: str
    asked: str  # the requested model
    dialect: str
    ended: str
    usage: Usage
    thinking: int = 0  # thinking tokens of the output
    kept: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None

    @property
    def day(self) -> str:
        """Return the day of the call in UTC, as 2026-11-23."""
        return datetime.datetime.fromtimestamp(self.time, datetime.UTC).date().isoformat()


@dataclass(frozen=True)
class UsageRow:
    """The sums over the calls of one group: their number, tokens and cost."""

    group: tuple[str, ...]
    calls: int
    usage: Usage
    kept: int
    cost: Fraction

    def as_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the row as JSON values; the cost also as an exact fraction."""
        return {
            **dict(zip(names, self.group, strict=True)), "calls": self.calls, **dict(self.usage), "kept": self.kept,
            "cost": float(self.cost), "exact_cost": str(self.cost),
        }  # fmt: skip


class PriceBook:
    """The price tables of all models; WorkbenchError if a table cannot be read."""

    def __init__(self, config: AccountingConfig):
        self._default = None if config.prices is None else load_prices(config.prices)
        self._by_model = {model: load_prices(name) for model, name in config.model_prices.items()}
        currencies = {each.currency for each in (self._default, *self._by_model.values()) if each is not None}
        if len(currencies) > 1:
            raise WorkbenchError(f"accounting: prices in {', '.join(sorted(currencies))} cannot be summed; use one")
        self.currency = next(iter(currencies), "")

    def check_models(self, names: Iterable[str]) -> None:
        """Raise WorkbenchError if one of the models has no price, since spending limits need prices."""
        missing = [name for name in names if self.of(name) is None]
        if missing:
            raise WorkbenchError(
                f"limits: money_per_day counts nothing for {', '.join(missing)}, which has no prices; "
                "give `accounting.prices`, or `accounting.model_prices` for each model"
            )

    def of(self, model: str) -> Prices | None:
        return self._by_model.get(model, self._default)

    def cost(self, model: str, usage: Usage) -> Fraction:
        prices = self.of(model)
        return Fraction(0) if prices is None else prices.cost(usage)


def priced_usage(used: Used, prices: Prices | None) -> Usage:
    """Return the tokens of a call by the kinds that `prices` names: without a cache price, cached tokens count as
    input.
    """
    hour = sum(count for seconds, count in used.cache_written_by_ttl if seconds > FIVE_MINUTES)
    five = max(0, used.written_tokens - hour)
    read = used.cached_tokens
    if prices is not None:
        if prices.cache_read is None:
            five = hour = read = 0
        elif prices.cache_write_1h is None:
            five, hour = five + hour, 0
        elif prices.cache_write_5m is None:
            five, hour = 0, five + hour
    rest = max(0, used.prompt_tokens - read - five - hour)
    return Usage(rest, five, hour, read, used.completion_tokens)


def account_entry(call: Call, asked: str, outcome: Outcome, prices: Prices | None, now: float) -> AccountEntry:
    """Return the entry in the accounts for a call that has ended, whatever its outcome."""
    used, is_kept = outcome.used, outcome.ended == "kept" or outcome.used.from_kept_answer
    return AccountEntry(
        call.id, now, call.caller.key, call.caller.tenant, call.model, asked, call.dialect, outcome.ended,
        Usage() if is_kept else priced_usage(used, prices),
        0 if is_kept else used.thinking_tokens,
        used.prompt_tokens + used.completion_tokens if is_kept else 0,
        outcome.seconds, outcome.first_token_seconds,
    )  # fmt: skip


class Accounts:
    """A writer of calls to an SQLite file, in one thread; `sums` returns totals of the calls.

    Args:
        file: the SQLite file; None for a temporary one, which is deleted when the accounts close.
        report: called with an error when entries cannot be written; writing is retried every `RETRY_SECONDS`, and with
            the next entry.

    Raises:
        WorkbenchError: if the file cannot be opened as accounts.
    """

    def __init__(self, file: Path | None = None, report: Callable[[str], object] = lambda _: None):
        self._name, self._report = str(file or "of this server"), report
        self._lock = threading.Lock()  # guards the connection
        self._changed = threading.Condition()  # guards all attributes below
        self._unwritten: deque[tuple[AccountEntry, Prices | None]] = deque()
        self._num_wanted = self._num_tried = 0  # number of requested write attempts
        self._is_closed = False
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = sqlite3.connect(file or "", timeout=10.0, check_same_thread=False)
            self._connection.executescript(f"pragma journal_mode=wal; {SCHEMA}")
        except sqlite3.Error as error:
            raise WorkbenchError(f"accounts {file}: cannot be used ({error}); name another file") from None
        self._thread = threading.Thread(target=self._write_all, name="accounts", daemon=True)
        self._thread.start()

    def add(self, entry: AccountEntry, prices: Prices | None) -> None:
        """Add a call. It is written soon; `flush` waits for that."""
        with self._changed:
            self._unwritten.append((entry, prices))
            self._want()

    @property
    def num_unwritten(self) -> int:
        """Return the number of calls that wait to be written."""
        return len(self._unwritten)

    def flush(self) -> None:
        """Wait until every entry so far is written or has failed."""
        with self._changed:
            number = self._want()
            self._changed.wait_for(lambda: self._num_tried >= number)

    def close(self) -> None:
        """Write the remaining entries and close the file. Entries that cannot be written are lost, and this is
        reported.
        """
        with self._changed:
            self._is_closed = True
            self._want()
        self._thread.join()
        with self._lock:
            self._connection.close()

    def sums(
        self,
        by: Sequence[str] = ("day",),
        since: str = "",
        where: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: Sequence[str] = (),
    ) -> list[UsageRow]:
        """Return sums of the calls from the day `since` on, grouped by any of `GROUPS`; `where` filters by the same
        names.

        Rows are sorted by group; the first `limit` rows after the group `after` are returned (None: all).

        Raises:
            WorkbenchError: for a name that is not in `GROUPS`, and a `since` that is not a day.
        """
        with self._lock:
            return sum_calls(self._connection, by, since, where or {}, limit, after)

    def _want(self) -> int:
        """Request a write attempt; return its number."""
        self._num_wanted += 1
        self._changed.notify_all()
        return self._num_wanted

    def _write_all(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                seconds = RETRY_SECONDS if self._unwritten else None
                self._changed.wait_for(lambda: self._num_wanted > self._num_tried, seconds)
                number, is_last = self._num_wanted, self._is_closed
            self._write_unwritten(is_last)
            with self._changed:
                self._num_tried = sys.maxsize if is_last else number
                self._changed.notify_all()

    def _write_unwritten(self, is_last: bool) -> None:
        try:
            for _ in range(-(-len(self._unwritten) // MAX_BATCH)):  # more entries may arrive meanwhile
                with self._changed:
                    batch = list(islice(self._unwritten, MAX_BATCH))
                with self._lock:
                    _write(self._connection, batch)
                    for _ in batch:
                        self._unwritten.popleft()
        except Exception as error:  # a full disk, for example: only `close` ends the thread
            fate = "lost" if is_last else "not written yet"
            self._report(f"accounts {self._name}: {len(self._unwritten)} calls are {fate} ({error})")


def sum_calls(
    connection: sqlite3.Connection,
    by: Sequence[str],
    since: str = "",
    where: Mapping[str, str] | None = None,
    limit: int | None = None,
    after: Sequence[str] = (),
) -> list[UsageRow]:
    """Return sums of calls, as `Accounts.sums` does, from an open connection to the accounts."""
    _check_day(since)
    for name in (*by, *(where or {})):
        if name not in GROUPS:
            raise WorkbenchError(f"usage by {name!r}: unknown{nearest(name, GROUPS)}; known: {', '.join(GROUPS)}")
    if after and len(after) != len(by):
        raise WorkbenchError(f"usage after {len(after)} values: give {len(by)}, one for each of {', '.join(by)}")
    columns, sums = ", ".join((*by, "prices")), ", ".join(("count(*)", *(f"sum({name})" for name in (*KINDS, "kept"))))
    tests, values = ["day >= ?", *(f"{name} = ?" for name in where or {})], [since, *(where or {}).values(), *after]
    if after:
        tests.append(f"({', '.join(by)}) > ({', '.join('?' * len(by))})")
    query = f"select {columns}, {sums} from calls where {' and '.join(tests)} group by {columns} order by {columns}"
    tables = connection.execute("select hash, content from prices")
    prices = {hash: Prices.from_values(json.loads(content)) for hash, content in tables}
    found: dict[tuple[str, ...], UsageRow] = {}
    for row in connection.execute(query, values):
        group, (hash, calls, *tokens, kept) = row[: len(by)], row[len(by) :]
        if group not in found and len(found) == limit:
            break
        usage = Usage(*tokens)
        cost = Fraction(0) if hash is None else prices[hash].cost(usage)
        one, other = UsageRow(group, calls, usage, kept, cost), found.get(group)
        found[group] = one if other is None else _added(one, other)
    return list(found.values())


def _check_day(since: str) -> None:
    try:
        is_day = not since or datetime.date.fromisoformat(since).isoformat() == since
    except ValueError:
        is_day = False
    if not is_day:
        raise WorkbenchError(f"usage since {since[:40]!r}: is no day; write it like 2026-11-23")


def currency_of(connection: sqlite3.Connection) -> str:
    """Return the currency of the prices in accounts; empty without prices."""
    found = {json.loads(content).get("currency", "") for (content,) in connection.execute("select content from prices")}
    return ", ".join(sorted(found))


@contextmanager
def open_accounts(file: Path) -> Iterator[sqlite3.Connection]:
    """Open accounts for reading while a server writes them.

    Raises:
        WorkbenchError: if there is no such file, or it does not contain accounts.
    """
    if not file.is_file():
        raise WorkbenchError(f"accounts {file}: there is no such file; name the `accounting.file` of a gateway")
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)) as connection:
        try:
            connection.execute("select id from calls limit 1")
        except sqlite3.Error as error:
            raise WorkbenchError(f"accounts {file}: holds no accounts ({error})") from None
        yield connection


def _added(one: UsageRow, other: UsageRow) -> UsageRow:
    usage = total_usage((one.usage, other.usage))
    return UsageRow(one.group, one.calls + other.calls, usage, one.kept + other.kept, one.cost + other.cost)


COLUMNS = (*(each.name for each in fields(AccountEntry) if each.name != "usage"), "day", "prices", *KINDS)
INSERT = f"insert into calls ({', '.join(COLUMNS)}) values ({', '.join(f':{name}' for name in COLUMNS)})"


def _write(connection: sqlite3.Connection, entries: Sequence[tuple[AccountEntry, Prices | None]]) -> None:
    with connection:
        for entry, prices in entries:
            content = "" if prices is None else prices.model_dump_json(exclude={"says"})
            hash = hashlib.blake2b(content.encode(), digest_size=16).hexdigest() if content else None
            if content:
                connection.execute("insert or ignore into prices values (?, ?)", (hash, content))
            connection.execute(INSERT, {**vars(entry), **dict(entry.usage), "day": entry.day, "prices": hash})
