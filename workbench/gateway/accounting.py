"""Enter every call in an account: tokens by kind, and what they cost at the prices of their day.

Calls are rows of an SQLite file, written by one thread; sums are computed from them, exactly.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import queue
import sqlite3
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

FIVE_MINUTES = 300.0  # seconds: what lives longer is priced as an hour
GROUPS = ("day", "key", "tenant", "model", "dialect", "ended", "id")
MAX_BATCH = 256  # calls that are written in one transaction
RETRY_SECONDS = 1.0  # until what could not be written is tried again
SCHEMA = """
create table if not exists prices (hash text primary key, content text not null);
create table if not exists calls (
  id text not null, time real not null, day text not null, key text not null, tenant text not null,
  model text not null, asked text not null, dialect text not null, ended text not null, prices text,
  input integer not null, cache_write_5m integer not null, cache_write_1h integer not null,
  cache_read integer not null, output integer not null, thinking integer not null, kept integer not null,
  seconds real not null, first_token_seconds real, calls integer not null default 1
);
create index if not exists calls_by_day on calls (day);
"""


class AccountingConfig(Settings):
    """Account for calls in `file`, with price tables by model."""

    file: Path | None = None  # None: in memory, as long as the server runs
    memory_calls: Count = 100_000  # that memory keeps one by one; older ones are added up, and have no id any more
    max_unwritten: Count = 10_000  # calls that wait for a disk that is full or locked; then new ones are refused
    prices: str | None = None  # a shipped price table or a YAML file; None: tokens are counted, and cost nothing
    model_prices: dict[str, str] = {}  # by model, where others hold


@dataclass(frozen=True)
class AccountEntry:
    """One call. `kept` counts the tokens of an answer that was kept, which are not in `usage` and cost nothing."""

    id: str
    time: float  # seconds since 1970
    key: str
    tenant: str
    model: str
    asked: str  # model that the client named
    dialect: str
    ended: str
    usage: Usage
    thinking: int = 0  # of the output
    kept: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None

    @property
    def day(self) -> str:
        """Return the day in UTC, as 2026-11-23."""
        return datetime.datetime.fromtimestamp(self.time, datetime.UTC).date().isoformat()


@dataclass(frozen=True)
class UsageRow:
    """Sums over the calls of one group."""

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
    """Price tables by model. Raises WorkbenchError where one cannot be read."""

    def __init__(self, config: AccountingConfig):
        self._default = None if config.prices is None else load_prices(config.prices)
        self._by_model = {model: load_prices(name) for model, name in config.model_prices.items()}
        currencies = {each.currency for each in (self._default, *self._by_model.values()) if each is not None}
        if len(currencies) > 1:
            raise WorkbenchError(f"accounting: prices in {', '.join(sorted(currencies))} cannot be summed; use one")
        self.currency = next(iter(currencies), "")

    def check_models(self, names: Iterable[str]) -> None:
        """Check that every model has a price, as limits of money need (WorkbenchError)."""
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
    """Return tokens by the kinds that `prices` has: where it has no price of a cache, they are input."""
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
    """Return the entry of a call that has ended, however it did."""
    used, is_kept = outcome.used, outcome.ended == "kept" or outcome.used.from_kept_answer
    return AccountEntry(
        call.id, now, call.caller.key, call.caller.tenant, call.model, asked, call.dialect, outcome.ended,
        Usage() if is_kept else priced_usage(used, prices),
        0 if is_kept else used.thinking_tokens,
        used.prompt_tokens + used.completion_tokens if is_kept else 0,
        outcome.seconds, outcome.first_token_seconds,
    )  # fmt: skip


class Accounts:
    """Write entries to SQLite from one thread, and sum them.

    Args:
        file: of SQLite; None for memory.
        memory_calls: that memory keeps one by one. Of older ones the sums remain, by every group but the id.
        report: called with an error that keeps entries from being written; they are tried again every
            `RETRY_SECONDS`, and with the next.

    Raises:
        WorkbenchError: where the file cannot be opened as accounts.
    """

    def __init__(
        self, file: Path | None = None, report: Callable[[str], object] = lambda _: None, memory_calls: int = 100_000
    ):
        self._address = str(file) if file is not None else f"file:accounts{id(self)}?mode=memory&cache=shared"
        self._file, self._report = file, report
        self._memory_calls = memory_calls if file is None else None
        self._lock = threading.Lock()  # connections to memory do not wait for each other's tables
        self._entries: queue.Queue[tuple[AccountEntry, Prices | None] | threading.Event | None] = queue.Queue()
        self._unwritten: deque[tuple[AccountEntry, Prices | None]] = deque()  # of the writing thread
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._keeper = self._connect()
            if file is not None:
                self._keeper.execute("pragma journal_mode=wal")
            self._keeper.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise WorkbenchError(f"accounts {file}: cannot be used ({error}); name another file") from None
        self._thread = threading.Thread(target=self._write_all, name="accounts", daemon=True)
        self._thread.start()

    def add(self, entry: AccountEntry, prices: Prices | None) -> None:
        """Enter a call. It is written soon; `flush` waits for that."""
        self._entries.put((entry, prices))

    @property
    def num_unwritten(self) -> int:
        """Return how many calls wait to be written, about."""
        return len(self._unwritten) + self._entries.qsize()

    def flush(self) -> None:
        """Wait until every entry so far is written, or could not be."""
        if self._thread.is_alive():
            done = threading.Event()
            self._entries.put(done)
            done.wait()

    def close(self) -> None:
        """Write what is left, and close the file. What cannot be written now is lost, which is reported."""
        self._entries.put(None)
        self._thread.join()
        self._keeper.close()

    def sums(
        self,
        by: Sequence[str] = ("day",),
        since: str = "",
        where: Mapping[str, str] | None = None,
        limit: int | None = None,
        after: Sequence[str] = (),
    ) -> list[UsageRow]:
        """Return sums of the calls from the day `since` on, by any of `GROUPS`; `where` selects by the same.

        Rows are sorted by group. Of those behind the group `after`, the first `limit` are returned; None for all.

        Raises:
            WorkbenchError: for a name that is none of `GROUPS`, and a `since` that is no day.
        """
        with self._lock, closing(self._connect()) as connection:
            return sum_calls(connection, by, since, where or {}, limit, after)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._address, uri=self._file is None, timeout=10.0, check_same_thread=False)

    def _write_all(self) -> None:
        with closing(self._connect()) as connection:
            is_last = False
            while not is_last:
                flushed, is_last = self._take()
                self._write_unwritten(connection, is_last)
                for event in flushed:
                    event.set()

    def _take(self) -> tuple[list[threading.Event], bool]:
        """Wait for entries and take some; return the events of those who wait for them, and whether none follow."""
        flushed: list[threading.Event] = []
        for number in range(MAX_BATCH):
            try:
                seconds = 0.0 if number else RETRY_SECONDS if self._unwritten else None
                item = self._entries.get(seconds != 0, seconds)
            except queue.Empty:
                break
            if item is None:
                return flushed, True
            if isinstance(item, threading.Event):
                flushed.append(item)
            else:
                self._unwritten.append(item)
        return flushed, False

    def _write_unwritten(self, connection: sqlite3.Connection, is_last: bool) -> None:
        try:
            while self._unwritten:
                batch = list(islice(self._unwritten, MAX_BATCH))
                with self._lock:
                    _write(connection, batch)
                    for _ in batch:
                        self._unwritten.popleft()
                    if self._memory_calls is not None:
                        _add_up(connection, self._memory_calls)
        except Exception as error:  # a full disk, say: nothing ends the thread but `close`
            fate = "lost" if is_last else "not written yet"
            self._report(f"accounts {self._address}: {len(self._unwritten)} calls are {fate} ({error})")


def sum_calls(
    connection: sqlite3.Connection,
    by: Sequence[str],
    since: str = "",
    where: Mapping[str, str] | None = None,
    limit: int | None = None,
    after: Sequence[str] = (),
) -> list[UsageRow]:
    """Return sums as `Accounts.sums` does, over an open connection."""
    _check_day(since)
    conditions = {"day": since} if since else {}
    for name in (*by, *(where or {})):
        if name not in GROUPS:
            raise WorkbenchError(f"usage by {name!r}: unknown{nearest(name, GROUPS)}; known: {', '.join(GROUPS)}")
    if after and len(after) != len(by):
        raise WorkbenchError(f"usage after {len(after)} values: give {len(by)}, one for each of {', '.join(by)}")
    columns = ", ".join((*by, "prices"))
    sums = ", ".join(f"sum({kind})" for kind in (*KINDS, "kept"))
    tests = [*(f"{name} >= ?" for name in conditions), *(f"{name} = ?" for name in where or {})]
    if after:
        tests.append(f"({', '.join(by)}) > ({', '.join('?' * len(by))})")
    clause = f"where {' and '.join(tests)}" if tests else ""
    tables = dict(connection.execute("select hash, content from prices"))
    prices = {hash: Prices.from_values(json.loads(content)) for hash, content in tables.items()}
    query = f"select {columns}, sum(calls), {sums} from calls {clause} group by {columns} order by {columns}"
    found: dict[tuple[str, ...], UsageRow] = {}
    for row in connection.execute(query, (*conditions.values(), *(where or {}).values(), *after)):
        group, table, calls = tuple(row[: len(by)]), row[len(by)], row[len(by) + 1]
        if group not in found and len(found) == limit:
            break
        usage, kept = Usage(*row[len(by) + 2 : -1]), row[-1]
        cost = Fraction(0) if table is None else prices[table].cost(usage)
        one = UsageRow(group, calls, usage, kept, cost)
        other = found.get(group)
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
    """Open accounts for reading, beside a server that writes them.

    Raises:
        WorkbenchError: where there is no such file, or it holds something else.
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


COLUMNS = tuple(each.name for each in fields(AccountEntry) if each.name != "usage")


def _write(connection: sqlite3.Connection, entries: Sequence[tuple[AccountEntry, Prices | None]]) -> None:
    if not entries:
        return
    names = (*COLUMNS, "day", "prices", *KINDS)
    marks = ", ".join("?" * len(names))
    with connection:
        for entry, prices in entries:
            content = None if prices is None else prices.model_dump_json(exclude={"says"})
            hash = None
            if content is not None:
                hash = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
                connection.execute("insert or ignore into prices values (?, ?)", (hash, content))
            values = [getattr(entry, name) for name in COLUMNS]
            values += [entry.day, hash, *(count for _, count in entry.usage)]
            connection.execute(f"insert into calls ({', '.join(names)}) values ({marks})", values)


SUMMED = (*KINDS, "thinking", "kept", "seconds", "calls")
SAME = ("day", "key", "tenant", "model", "asked", "dialect", "ended", "prices")


def _add_up(connection: sqlite3.Connection, max_calls: int) -> None:
    """Replace the oldest calls by their sums, half of `max_calls` of them where there are more."""
    (count,) = connection.execute("select count(*) from calls where id != ''").fetchone()
    if count <= max_calls:
        return
    same, sums = ", ".join(SAME), ", ".join(f"sum({name})" for name in SUMMED)
    oldest = f"(select rowid from calls where id != '' order by rowid limit {count - max_calls // 2})"
    chosen = f"from calls where id = '' or rowid in {oldest}"
    with connection:
        added = f"select '' as id, max(time) as time, {same}, {sums} {chosen} group by {same}"
        connection.execute(f"create temp table sums as {added}")
        connection.execute(f"delete {chosen}")
        connection.execute(f"insert into calls (id, time, {same}, {', '.join(SUMMED)}) select * from sums")
        connection.execute("drop table sums")
