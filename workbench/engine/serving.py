"""What policies are made of: an order in which sequences are served, and how far a step's tokens and pages go."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from workbench.engine.policy import Entry, State, Wishes


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


def turn_of(state: State, patience: int, key: Callable[[Entry], Any]) -> Callable[[Entry], tuple]:
    def turn(entry: Entry) -> tuple:
        return (0, 0, entry.order) if state.step - entry.since >= patience else (1, key(entry), entry.order)

    return turn


def in_turn(
    state: State, patience: int, entries: Iterable[Entry], key: Callable[[Entry], Any]
) -> Iterator[Entry]:
    """Who is overdue, then the others by `key`; sorted no further than it is looked at."""
    turn = turn_of(state, patience, key)
    heap = [(turn(entry), entry) for entry in entries]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[1]
