"""Provide building blocks of policies: orders in which requests are scheduled, aging, and limits of tokens
and pages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from workbench.engine.policy import Entry, State, Wishes

SHARE = 4  # one admission in this many goes to the oldest starving request


def serve(
    state: State,
    turns: Iterable[Entry],
    keep: Iterable[Entry] | None = None,
    decodes: Sequence[Entry] = (),
    after: Sequence[Entry] = (),
) -> Wishes:
    """Schedule requests in order until tokens, slots or pages run out.

    Each of `decodes` gets one token, then running and waiting requests of `order` get theirs, then each of
    `late_decodes` gets one token. The first waiting request that does not fit is named as next in line.

    Args:
        state: the scheduler's state.
        order: running and waiting requests, in order of service.
        keep_order: order in which running requests keep their pages; by arrival unless given.
        decodes: decoding requests to schedule first.
        late_decodes: decoding requests to schedule last.
    """
    left, chunk, free = state.budget, state.chunk, state.free
    places = -1  # not computed yet
    unasked = len(state.running) - len(decodes) - len(after)
    tokens = {entry.id: 1 for entry in decodes[:left]}
    left -= len(tokens)
    begin: list[tuple[str, int]] = []
    closed = blocked = False
    for entry in turns:
        if entry.runs:
            unasked -= 1
            if entry.todo == 1:
                length = min(1, left)
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
            places = state.places if places < 0 else places
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
    tokens |= {entry.id: 1 for entry in after[:left]}
    given = tokens.get
    if keep is None and len(decodes) == len(tokens) == len(state.running):
        wishes = list(tokens.items())
    else:
        wishes = [(entry.id, given(entry.id, 0)) for entry in (state.running if keep is None else keep)]
    wishes += begin
    return Wishes(wishes)


def parted(running: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Split running requests into decodes and prefills."""
    decodes = [entry for entry in running if entry.todo == 1]
    prefills = [entry for entry in running if entry.todo != 1] if len(decodes) < len(running) else []
    return decodes, prefills


def overdue(state: State, patience: int, entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Split `entries` into those that have waited `starvation_limit` steps since arrival, in order of arrival, and
    the others."""
    entries, since = list(entries), state.step - patience
    late = [entry for entry in entries if entry.since <= since]
    others = [entry for entry in entries if entry.since > since] if late else entries
    return sorted(late, key=lambda entry: entry.order), others


def waiting_overdue(state: State, patience: int) -> Iterator[Entry]:
    """Yield waiting requests that are starving, oldest first."""
    since = state.step - patience
    return takewhile(lambda entry: entry.since <= since, state.waiting)


def spared(state: State, patience: int, entries: Sequence[Entry]) -> Entry | None:
    """Return the oldest of `entries`, which are in order of arrival, if it is starving."""
    return entries[0] if entries and state.step - entries[0].since >= patience else None


def in_turn(state: State, patience: int, prefills: list[Entry], key: Callable[[Entry], Any]) -> Iterator[Entry]:
    """Merge `prefills` and waiting requests by `key`, with aging: a starving request that is the oldest of `prefills`
    comes first.

    Waiting requests keep this order (`SchedulerState.waiting_by`) and are merged lazily; starving ones as `with_aging`
    says.
    """
    waiting = state.by(key)
    if not prefills:
        return sharing(state, patience, iter(waiting))
    first = spared(state, patience, prefills)

    def turn(entry: Entry) -> tuple[bool, Any, int]:
        return entry is not first, key(entry), entry.order

    return sharing(state, patience, heapq.merge(sorted(prefills, key=turn), waiting, key=turn))


def sharing(state: State, patience: int, turns: Iterator[Entry]) -> Iterator[Entry]:
    """Yield `order`, but give one in AGING_INTERVAL admissions to the oldest waiting request if it is starving."""
    begun, gone = state.admitted, set[str]()
    late = waiting_overdue(state, patience)
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
