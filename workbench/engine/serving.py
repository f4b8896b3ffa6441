"""What policies are made of: an order in which sequences are served, and how far a step's tokens and pages go."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from typing import Any

from workbench.engine.policy import Entry, State, Wishes

SHARE = 4  # one admission in so many goes to the oldest that is overdue, the others as a policy has it


def serve(state: State, turns: Iterable[Entry], keep: Iterable[Entry] | None = None) -> Wishes:
    """Tokens for everybody in `turns`, who runs or waits, as far as the step's go; who waits begins as long as there
    are places and pages, and the first for whom there are not is named as the next in line. `keep` is the order in
    which those that run hold on to their pages, that of arrival unless given."""
    left, chunk, places, free = state.budget, state.chunk, state.places, state.free
    unasked = len(state.running)
    tokens: dict[str, int] = {}
    begin: list[tuple[str, int]] = []
    closed = blocked = False
    for entry in turns:
        if entry.runs:
            unasked -= 1
            if entry.decodes:
                length = min(entry.todo, left)
            else:
                length = 0 if blocked else state.portion(entry.todo, left, chunk)
                blocked |= entry.todo > length == 0
                chunk -= length
            tokens[entry.id] = length
        elif closed:
            if not unasked:
                break
            continue
        else:
            length = 0
            if min(free) >= 0 and left > 0 and chunk > 0 and not blocked and places >= entry.seats:
                needs = state.needs[entry.id]
                if all(count <= pages for count, pages in zip(needs, free, strict=True)):
                    length = state.portion(state.todo(entry), left, chunk)
            if length:
                places -= entry.places
                free = tuple(pages - count for count, pages in zip(needs, free, strict=True))
                chunk -= length
            closed = not length
            begin.append((entry.id, length))
        left -= length
    kept = state.running if keep is None else keep
    return Wishes([*((entry.id, tokens.get(entry.id, 0)) for entry in kept), *begin])


def parted(running: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Those that decode, and those in prefill."""
    decodes: list[Entry] = []
    prefills: list[Entry] = []
    for entry in running:
        (decodes if entry.decodes else prefills).append(entry)
    return decodes, prefills


def overdue(state: State, patience: int, entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Those of `entries` that are overdue, in order of arrival, and the others as they stand."""
    late: list[Entry] = []
    others: list[Entry] = []
    for entry in entries:
        (late if state.step - entry.since >= patience else others).append(entry)
    return sorted(late, key=lambda entry: entry.order), others


def spared(state: State, patience: int, entries: Sequence[Entry]) -> Entry | None:
    """The oldest of `entries`, which stand in order of arrival, if it is overdue."""
    return entries[0] if entries and state.step - entries[0].since >= patience else None


def in_turn(state: State, patience: int, prefills: list[Entry], key: Callable[[Entry], Any]) -> Iterator[Entry]:
    """`prefills` and who waits, by `key`; the oldest of `prefills` before all if it is overdue, and who waits and is
    overdue as `sharing` says. Sorted no further than it is looked at."""
    first = spared(state, patience, prefills)
    heap = [((entry is not first, key(entry), entry.order), entry) for entry in chain(prefills, state.waiting)]
    heapq.heapify(heap)
    return sharing(state, patience, (heapq.heappop(heap)[1] for _ in range(len(heap))))


def sharing(state: State, patience: int, turns: Iterator[Entry]) -> Iterator[Entry]:
    """`turns` as they come, but for one in `SHARE` admissions, which goes to the oldest that waits if it is overdue."""
    begun, gone = state.admitted, set[str]()
    late = takewhile(lambda entry: state.step - entry.since >= patience, state.waiting)  # the oldest first
    for entry in turns:
        if entry.id in gone:
            continue
        if not entry.runs:
            oldest = next((each for each in late if each.id not in gone), entry) if begun % SHARE == 0 else entry
            if oldest is not entry:
                gone.add(oldest.id)
                begun += 1
                yield oldest
            gone.add(entry.id)
            begun += 1
        yield entry
