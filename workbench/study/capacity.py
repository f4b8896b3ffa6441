"""How many sequences a memory of fixed size holds: pools are made of it, and the scheduler fills them."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.cache.holdings import Holdings
from workbench.cache.pages import PagePool
from workbench.cache.store import KVStore
from workbench.cache.tables import Table
from workbench.engine.scheduler import Limits, Scheduler
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.request import Sequence as Served


def page_bytes(store: KVStore) -> tuple[int, ...]:
    """What one page of each table takes, counted from the tensors."""
    return tuple(
        sum(tensor.nbytes // tensor.shape[0] for tensor in store.paged(table)) for table in range(len(store.tables))
    )


def stored_bytes_per_token(store: KVStore) -> float:
    """What a token takes where it stays: a layer that keeps recent tokens apart is counted without that."""
    late = {layer for table in store.tables if table.late for layer in table.layers}
    kept = [table.late or not late.intersection(table.layers) for table in store.tables]
    return sum(size for size, counts in zip(page_bytes(store), kept, strict=True) if counts) / store.page_size


def pages_within(
    tables: Sequence[Table], sizes: Sequence[int], budget: int, tokens: int, chunk: int, page: int
) -> tuple[tuple[int, ...], int]:
    """Pages of each table that take at most `budget` bytes, null pages included, so that as many sequences of `tokens`
    tokens as possible run at once, and how many these are. `sizes` are bytes a page, `chunk` the tokens of a step."""
    most = [table.most(tokens, chunk, page) for table in tables]
    one = sum(count * size for count, size in zip(most, sizes, strict=True))
    fit = (budget - sum(sizes)) // one
    if fit < 1:
        raise WorkbenchError(f"a pool of {budget:,} bytes holds no sequence of {tokens:,} tokens: one takes {one:,}")
    return tuple(max(1, fit * count) for count in most), fit


def sequences_at_once(
    tables: Sequence[Table], pages: Sequence[int], page: int, tokens: int, chunk: int, asked: int
) -> int:
    """The most of `asked` sequences that the scheduler has at `tokens` tokens at the same time, until it must set one
    back or has no room for more. Those that are through stay, and keep their pages."""
    pools = tuple(PagePool(count, page) for count in pages)
    scheduler = Scheduler(Holdings(pools, tables, chunk), Limits(asked, chunk), tokens + 1)
    for index in range(asked):
        scheduler.submit(Served.of(Request(str(index), (0,) * tokens, SamplingParameters(max_tokens=1)), index))
    while (plan := scheduler.plan()) is not None:
        if any(decision.action == "set_back" for decision in plan.decisions):
            break
        scheduler.commit(plan, {})
    return sum(sequence.computed == tokens for sequence in scheduler.running)
