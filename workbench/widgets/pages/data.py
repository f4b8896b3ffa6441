"""Take snapshots of the pages and their owners as plain numbers, and keep a log of them step by step.

    page of a group        0 (null) | free | held by sequences | idle: held by the prefix index alone
    slot on the CPU                 free | saved by a preempted sequence | of the index

Snapshots are taken between two steps of a scheduler; beyond a maximum the log is thinned.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workbench.display import format_ranges
from workbench.kv_cache.pages import NULL_PAGE
from workbench.trace.events import Event, Stepped, StepPlanned

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.kv_cache.manager import KVCacheManager
    from workbench.scheduler.scheduler import Scheduler

Ints = NDArray[np.int32]
MAX_SNAPSHOTS = 1024  # most kept snapshots; beyond them every second one of the older half is dropped


@dataclass(frozen=True)
class PagePanel:
    """The pages of one cache group, or its CPU pages: `pages` of `page_size` tokens, numbered from 1."""

    title: str
    pages: int
    page_size: int
    on_cpu: bool = False


@dataclass(frozen=True, eq=False)
class PageOwner:
    """A sequence that owns pages. For each panel it has its `pages` in the order of its text (0: the null page), and
    `next_states`, the pages to which its next step writes recurrent states."""

    name: str
    running: bool
    pages: tuple[tuple[int, ...], ...]
    next_states: tuple[tuple[int, ...], ...]

    def held(self, panel: int) -> tuple[int, ...]:
        """Return all pages that the sequence holds in a panel; those for its next states come last."""
        return self.pages[panel] + self.next_states[panel]


@dataclass(frozen=True, eq=False)
class PageCensus:
    """Counts for each page of one panel, by page number, with page 0 included.

    `first_owner` is the index of the first owner (-1: none), `num_owners` the number of owners, `tokens` the number of
    tokens in the page after the step (0 without an owner; pages of the index are full)."""

    first_owner: Ints
    num_owners: Ints
    tokens: Ints


@dataclass(frozen=True, eq=False)
class PageSnapshot:
    """The pages of all panels during step `step`, or with `between_steps` after the previous step.

    `tokens` and `tokens_before` [owner, panel] are the numbers of tokens in an owner's pages after and before the step.
    By panel, `references` [page] is a page's reference count, and `in_prefix_index` [page] tells whether the prefix
    index holds it.
    """

    step: int
    between_steps: bool
    panels: tuple[PagePanel, ...]
    owners: tuple[PageOwner, ...]
    tokens: Ints
    tokens_before: Ints
    references: tuple[Ints, ...]
    in_prefix_index: tuple[NDArray[np.bool_], ...]

    @cached_property
    def census(self) -> tuple[PageCensus, ...]:
        return tuple(self._count_owners(number) for number in range(len(self.panels)))

    @cached_property
    def counts(self) -> tuple[tuple[list[int], int, int], ...]:
        """Return for each panel the number of exclusive pages of each owner, the number of shared pages, and the number
        of idle pages."""
        panels = range(len(self.panels))
        return tuple((self.num_exclusive(panel), self.num_shared(panel), self.num_idle(panel)) for panel in panels)

    @cached_property
    def last_used_page(self) -> tuple[int, ...]:
        """Return for each panel the highest number of a page in use, or 0."""
        return tuple(int(np.flatnonzero(each)[-1]) if each.any() else 0 for each in self.references)

    def num_free(self, panel: int) -> int:
        return int((self.references[panel][1:] == 0).sum())

    def num_shared(self, panel: int) -> int:
        """Return the number of pages that several sequences hold."""
        return int((self.census[panel].num_owners > 1).sum())

    def num_idle(self, panel: int) -> int:
        """Return the number of pages that only the prefix index holds."""
        return int((self.in_prefix_index[panel] & (self.census[panel].num_owners == 0)).sum())

    def num_exclusive(self, panel: int) -> list[int]:
        """Return for each owner the number of pages that it shares with no other owner."""
        count = self.census[panel]
        return np.bincount(count.first_owner[count.num_owners == 1], minlength=len(self.owners)).tolist()

    def _count_owners(self, panel: int) -> PageCensus:
        size, pages = self.panels[panel].page_size, self.panels[panel].pages
        first, tokens = np.full(pages + 1, -1, np.int32), np.zeros(pages + 1, np.int32)
        owners = np.zeros(pages + 1, np.int32)
        for number in range(len(self.owners) - 1, -1, -1):
            owner = self.owners[number]
            mine = np.array(owner.held(panel), np.int32)
            # A recurrent state joins the sequence's pages at the end of the step.
            tokens_there = self.tokens_before if owner.next_states[panel] else self.tokens
            filled = np.clip(tokens_there[number, panel] - size * np.arange(len(mine)), 0, size)
            filled[len(owner.pages[panel]) :] = 0
            here = mine != NULL_PAGE
            mine = mine[here]
            first[mine], tokens[mine] = number, np.maximum(tokens[mine], filled[here])
            owners[mine] += 1
        return PageCensus(first, owners, tokens)


def take_snapshot(
    scheduler: Scheduler,
    panels: tuple[PagePanel, ...],
    computed_until: Mapping[str, int] | None = None,
    previous: PageSnapshot | None = None,
) -> PageSnapshot:
    """Return a snapshot of the pages of `scheduler`, taken between two steps.

    `computed_until` is given for a step that was just planned: by request, the position up to which the step computes.
    Parts that equal the snapshot `previous` are shared with it.
    """
    manager = scheduler.kv_cache_manager
    known = {owner.name: owner for owner in previous.owners} if previous is not None else {}
    running = set(scheduler.running)
    owners, after, earlier = [], [], []
    sequences = [*scheduler.running, *scheduler.waiting]
    for sequence in sequences:
        swapped = sequence.swapped or manager.cpu_pages.swapping_in.get(sequence.arrival_index)
        lists = [*sequence.pages, *(swapped.cpu_pages if swapped is not None else ())]
        states = [sequence.states[t].all if t in sequence.states else [] for t in range(len(panels))]
        if not any(lists) and not any(states):
            continue
        end = (computed_until or {}).get(sequence.request_id, sequence.num_computed_tokens)
        there = swapped.num_computed_tokens - swapped.num_evicted_tokens if swapped is not None else 0
        groups = manager.groups
        on_cpu = [group.quantized_until(there) for group in groups] if len(panels) > len(groups) else []
        after.append([group.quantized_until(end - sequence.num_evicted_tokens) for group in groups] + on_cpu)
        earlier.append([group.quantized_until(sequence.num_stored_tokens) for group in groups] + on_cpu)
        lists += [[] for _ in range(len(panels) - len(lists))]
        owners.append(_owner(sequence.request_id, sequence in running, lists, states, known.get(sequence.request_id)))
    for index in manager.cpu_pages.swapping_in.keys() - {sequence.arrival_index for sequence in sequences}:
        swapped = manager.cpu_pages.swapping_in[index]  # ended before its pages were back; they are freed soon
        lists = [[] for _ in manager.pools] + list(swapped.cpu_pages)
        owners.append(_owner(f"(ended {index})", False, lists, [[]] * len(panels), None))
        after.append([0] * len(panels))
        earlier.append([0] * len(panels))
    references, kept = _references_and_index(manager, previous)
    step = scheduler.next_step if computed_until is None else scheduler.next_step - 1
    shape = (len(owners), len(panels))
    tokens, held = (np.array(each, np.int32).reshape(shape) for each in (after, earlier))
    return PageSnapshot(step, computed_until is None, panels, tuple(owners), tokens, held, references, kept)


def panels_of_cache(manager: KVCacheManager) -> tuple[PagePanel, ...]:
    """Return the panels of a KV cache manager: one for each cache group, and one for the CPU pages of each group."""
    groups = [PagePanel(f"group {t}", pool.num_pages, pool.page_size) for t, pool in enumerate(manager.pools)]
    on_cpu = [
        PagePanel(f"CPU, of group {t}", pool.num_pages, pool.page_size, True)
        for t, pool in enumerate(manager.cpu_pages.pools)
    ]
    return (*groups, *on_cpu)


def panels_of_runner(runner: Runner) -> tuple[PagePanel, ...]:
    """Return the panels of a runner's cache, titled with each group's layers, format and window."""
    store, titles = runner.store, {}
    for number, group in enumerate(store.groups):
        shape = store.specs[group.layers[0]]
        title_parts = [f"group {number}", f"layers {format_ranges(group.layers)}"]
        if group.is_recurrent:
            title_parts.append("recurrent states")
        elif not shape.keeps_residual:
            plain = "latent rows" if shape.num_value_columns is not None else str(store.dtype).removeprefix("torch.")
            title_parts.append(plain if shape.codec is None else str(shape.format))
        else:
            quantized = number == shape.group
            title_parts.append(
                f"quantized: {shape.format}" if quantized else "residual, in full precision: not quantized yet"
            )
        if shape.sliding_window is not None:
            title_parts.append(
                f"window {shape.sliding_window}" + (f", {shape.num_sink_tokens} sinks" if shape.num_sink_tokens else "")
            )
        titles[number] = " · ".join(title_parts)
    return tuple(
        replace(panel, title=panel.title if panel.on_cpu else titles[number])
        for number, panel in enumerate(panels_of_cache(runner.kv_cache.manager))
    )


def _owner(
    name: str,
    running: bool,
    lists: Sequence[Sequence[int]],
    states: Sequence[Sequence[int]],
    known: PageOwner | None,
) -> PageOwner:
    pages, next_states = tuple(map(tuple, lists)), tuple(map(tuple, states))
    same = known is not None and (known.running, known.pages, known.next_states) == (running, pages, next_states)
    return known if known is not None and same else PageOwner(name, running, pages, next_states)


def _references_and_index(
    manager: KVCacheManager, before: PageSnapshot | None
) -> tuple[tuple[Ints, ...], tuple[NDArray[np.bool_], ...]]:
    references, kept = [], []
    for number, pool in enumerate((*manager.pools, *manager.cpu_pages.pools)):
        counts, marks = pool.ref_counts()
        counted, marked = np.array(counts, np.int32), np.frombuffer(marks, np.bool_).copy()
        if number >= len(manager.pools):  # the CPU pools mark no cached pages
            marked[_index_pages_on_cpu(manager, number - len(manager.pools))] = True
        if before is not None and np.array_equal(before.references[number], counted):
            counted = before.references[number]
        if before is not None and np.array_equal(before.in_prefix_index[number], marked):
            marked = before.in_prefix_index[number]
        references.append(counted)
        kept.append(marked)
    return tuple(references), tuple(kept)


def _index_pages_on_cpu(manager: KVCacheManager, group: int) -> list[int]:
    """Return the CPU pages of the prefix cache, and those being swapped in."""
    fetched = [place for t, place in manager.cpu_pages.fetched if t == group]
    return fetched + (list(manager.prefix_cache.tree.on_cpu[group]) if manager.prefix_cache is not None else [])


class SnapshotLog:
    """Snapshots of the pages in the order of their steps. The tuple `snapshots` is replaced, never changed, so any
    thread may read it. `owner_numbers` numbers the owners in order of appearance."""

    def __init__(self, snapshots: Sequence[PageSnapshot] = (), max_snapshots: int = MAX_SNAPSHOTS):
        self.snapshots: tuple[PageSnapshot, ...] = ()
        self.owner_numbers: dict[str, int] = {}
        self.num_thinned = 0  # number of dropped snapshots
        self._numbers = itertools.count()
        self._most = max_snapshots
        for each in snapshots:
            self.add(each)

    def add(self, snapshot: PageSnapshot) -> None:
        """Append a snapshot; it replaces earlier ones of the same or a later step, such as one between two steps."""
        for owner in snapshot.owners:
            if owner.name not in self.owner_numbers:
                self.owner_numbers = {**self.owner_numbers, owner.name: next(self._numbers)}
        kept = self.snapshots
        while kept and kept[-1].step >= snapshot.step:
            kept = kept[:-1]
        kept = (*kept, snapshot)
        if len(kept) > self._most:
            half = self._most // 2
            self.num_thinned += half // 2
            kept = (*kept[:half:2], *kept[half:])
        self.snapshots = kept

    def drop_before(self, step: int) -> None:
        """Drop the snapshots of earlier steps, except the last one, and the owners that occur in no other.

        Call it in the thread that calls `add`."""
        kept = self.snapshots
        first = min(bisect_left(kept, step, key=lambda each: each.step), len(kept) - 1)
        if first > 0:
            self.snapshots = kept[first:]
            names = {owner.name for each in self.snapshots for owner in each.owners}
            self.owner_numbers = {name: number for name, number in self.owner_numbers.items() if name in names}

    def at(self, step: int) -> PageSnapshot:
        """Return the last snapshot at or before `step`, or the first if all are later."""
        kept = self.snapshots
        return kept[max(0, bisect_right(kept, step, key=lambda each: each.step) - 1)]


def snapshot_listener(
    log: SnapshotLog, scheduler: Scheduler, panels: tuple[PagePanel, ...], on_change: Callable[[], None]
) -> Callable[[Event], None]:
    """Return a listener for a runner's events that logs a snapshot for each step, and one when all requests have ended.

    It must be called in the runner's thread."""

    def hear(event: Event) -> None:
        last = log.snapshots[-1] if log.snapshots else None
        if isinstance(event, StepPlanned):
            ends = {span.sequence: span.start + span.tokens for span in event.spans}
            log.add(take_snapshot(scheduler, panels, ends, last))
        elif isinstance(event, Stepped) and not scheduler.has_unfinished_requests:
            log.add(take_snapshot(scheduler, panels, None, last))
        else:
            return
        on_change()

    return hear
