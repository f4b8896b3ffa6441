"""Take snapshots of a scheduler's pages between two of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.shown import format_ranges
from workbench.widgets.pages.snapshot import Ints, PageOwner, PagePanel, PageSnapshot


def take_snapshot(
    scheduler: Any,
    panels: tuple[PagePanel, ...],
    computed_until: Mapping[str, int] | None = None,
    previous: PageSnapshot | None = None,
) -> PageSnapshot:
    """Take a snapshot of the pages of `scheduler` (`scheduler.Scheduler`) between two steps.

    `computed_until` are, where a step was just planned, the positions up to which it computes each sequence. Parts
    unchanged since the snapshot `previous` are shared with it.
    """
    holdings = scheduler.holdings
    known = {owner.name: owner for owner in previous.owners} if previous is not None else {}
    running = set(scheduler.running)
    owners, after, earlier = [], [], []
    everybody = [*scheduler.running, *scheduler.waiting]
    for sequence in everybody:
        saved = sequence.saved or holdings.host.loaded.get(sequence.order)
        lists = [*sequence.pages, *(saved.places if saved is not None else ())]
        if not any(lists):
            continue
        end = (computed_until or {}).get(sequence.request_id, sequence.computed)
        there = saved.computed - saved.evicted if saved is not None else 0
        tables = holdings.tables
        host = [table.settled(there) for table in tables] if len(panels) > len(tables) else []
        after.append([table.settled(end - sequence.evicted) for table in tables] + host)
        earlier.append([table.settled(sequence.held) for table in tables] + host)
        lists += [[] for _ in range(len(panels) - len(lists))]
        owners.append(_owner(sequence.request_id, sequence in running, lists, known.get(sequence.request_id)))
    for order in holdings.host.loaded.keys() - {sequence.order for sequence in everybody}:
        saved = holdings.host.loaded[order]  # it ended before its pages were back: the places are given up soon
        lists = [[] for _ in holdings.pools] + list(saved.places)
        owners.append(_owner(f"(ended {order})", False, lists, None))
        after.append([0] * len(panels))
        earlier.append([0] * len(panels))
    references, kept = _references_and_index(holdings, previous)
    step = scheduler.steps if computed_until is None else scheduler.steps - 1
    shape = (len(owners), len(panels))
    tokens, held = (np.array(each, np.int32).reshape(shape) for each in (after, earlier))
    return PageSnapshot(step, computed_until is None, panels, tuple(owners), tokens, held, references, kept)


def panels_of_cache(holdings: Any) -> tuple[PagePanel, ...]:
    """The panels of `cache.holdings.Holdings` of which nothing more is known than its tables."""
    tables = [PagePanel(f"table {t}", pool.pages, pool.page_size) for t, pool in enumerate(holdings.pools)]
    rooms = [
        PagePanel(f"host, of table {t}", room.pages, room.page_size, True) for t, room in enumerate(holdings.host.rooms)
    ]
    return (*tables, *rooms)


def panels_of_runner(runner: Any) -> tuple[PagePanel, ...]:
    """The panels of a runner's cache: what each table holds, of which layers, in what format."""
    store, titles = runner.store, {}
    for number, table in enumerate(store.tables):
        shape = store.shapes[table.layers[0]]
        title_parts = [f"table {number}", f"layers {format_ranges(table.layers)}"]
        if not shape.format.packed:
            title_parts.append("latent rows" if shape.shared is not None else str(store.dtype).removeprefix("torch."))
        else:
            packed = number == shape.table
            title_parts.append(f"quantized: {shape.format}" if packed else "residual, in full precision: not quantized yet")
        if shape.window is not None:
            title_parts.append(f"window {shape.window}" + (f", {shape.sinks} sinks" if shape.sinks else ""))
        titles[number] = " · ".join(title_parts)
    return tuple(
        replace(panel, title=panel.title if panel.on_cpu else titles[number])
        for number, panel in enumerate(panels_of_cache(runner.cache.holdings))
    )


def _owner(name: str, running: bool, lists: Sequence[Sequence[int]], known: PageOwner | None) -> PageOwner:
    pages = tuple(map(tuple, lists))
    same = known is not None and (known.running, known.pages) == (running, pages)
    return known if known is not None and same else PageOwner(name, running, pages)


def _references_and_index(holdings: Any, before: PageSnapshot | None) -> tuple[tuple[Ints, ...], tuple[NDArray[np.bool_], ...]]:
    references, kept = [], []
    for number, pool in enumerate((*holdings.pools, *holdings.host.rooms)):
        counts, marks = pool.counts()
        counted, marked = np.array(counts, np.int32), np.frombuffer(marks, np.bool_).copy()
        if number >= len(holdings.pools):  # a room's index has no marks of its own
            marked[_index_pages_on_cpu(holdings, number - len(holdings.pools))] = True
        if before is not None and np.array_equal(before.references[number], counted):
            counted = before.references[number]
        if before is not None and np.array_equal(before.in_prefix_index[number], marked):
            marked = before.in_prefix_index[number]
        references.append(counted)
        kept.append(marked)
    return tuple(references), tuple(kept)


def _index_pages_on_cpu(holdings: Any, table: int) -> list[int]:
    """Places on the host of pages that the prefix index laid there, and of those on their way back from there."""
    fetched = [place for t, place in holdings.host.fetched if t == table]
    return fetched + (list(holdings.prefix.tree.hosted[table]) if holdings.prefix is not None else [])
