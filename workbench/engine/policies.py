"""The policies that come with the workbench. Each is a value: the name under `schedule.policy`, and its settings.

Nobody starves under any of them. `fcfs` serves in order of arrival. Under the others whoever has been here for
`patience` steps is overdue, and who is overdue goes before all who are not, in order of arrival: so the oldest of all
gets all it needs `patience` steps after it came, at the latest, and when it ends the next one is the oldest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.engine.policy import Entry, Policy, State, Wishes

Steps = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    steady: ClassVar[bool] = True


class FCFS(_Part):
    """First come, first served: decodes, then prefills in the tokens that are left (Sarathi-Serve's mixed steps)."""

    kind: Literal["fcfs"] = "fcfs"

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = _parted(state.running)
        return serve(state, chain(decodes, prefills, state.waiting))


class PrefillFirst(_Part):
    """Prefills before decodes, which get what is left of the step: the first token comes soon, the others may stall."""

    kind: Literal["prefill_first"] = "prefill_first"
    patience: Steps = 1000

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = _parted(state.running)
        late, others = _late(state, self.patience, decodes)
        return serve(state, chain(late, prefills, state.waiting, others))


class DecodeFirst(_Part):
    """As long as anything decodes nobody is prefilled, but for who has been here for `patience` steps: even gaps
    between tokens, and a first token that comes late."""

    kind: Literal["decode_first"] = "decode_first"
    patience: Steps = 64

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = _parted(state.running)
        if not decodes:
            return serve(state, chain(prefills, state.waiting))
        late, _ = _late(state, self.patience, chain(prefills, state.waiting))
        wishes = serve(state, chain(decodes, late))
        if late or not state.waiting:
            return wishes
        head = state.waiting[0]
        words = f"{len(decodes)} sequences decode, and it has waited {state.step - head.since} of {self.patience} steps"
        return replace(wishes, tokens=(*wishes.tokens, (head.id, 0)), because={head.id: words})


class ShortestPrompt(_Part):
    """Short prompts are admitted and prefilled first."""

    kind: Literal["shortest_prompt"] = "shortest_prompt"
    patience: Steps = 1000

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = _parted(state.running)
        behind = _in_turn(state, self.patience, chain(prefills, state.waiting), lambda entry: entry.todo)
        return serve(state, chain(decodes, behind))


class Priority(_Part):
    """The smaller `Request.priority`, the sooner; the largest gives way first when pages run out."""

    kind: Literal["priority"] = "priority"
    patience: Steps = 1000

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = _parted(state.running)
        behind = _in_turn(state, self.patience, chain(prefills, state.waiting), _priority)
        keep = sorted(state.running, key=_turn(state, self.patience, _priority))
        return serve(state, chain(decodes, behind), keep)


class Fair(_Part):
    """Next comes the tenant for whom the fewest tokens were computed, with its oldest request (the virtual token
    counter of Sheng et al., 2024)."""

    kind: Literal["fair"] = "fair"
    patience: Steps = 1000

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = _parted(state.running)
        return serve(state, chain(decodes, prefills, self._by_tenant(state)))

    def _by_tenant(self, state: State) -> Iterator[Entry]:
        late, rest = _late(state, self.patience, state.waiting)
        queues: dict[str, list[Entry]] = {}
        for entry in reversed(rest):
            queues.setdefault(entry.tenant, []).append(entry)
        served = {tenant: state.served[tenant] for tenant in {entry.tenant for entry in state.waiting}}
        for entry in late:
            served[entry.tenant] += entry.todo
            yield entry
        heap = [(served[tenant], queue[-1].order, tenant) for tenant, queue in queues.items()]
        heapq.heapify(heap)
        while heap:
            tokens, _, tenant = heapq.heappop(heap)
            entry = queues[tenant].pop()
            yield entry
            if queues[tenant]:
                heapq.heappush(heap, (tokens + entry.todo, queues[tenant][-1].order, tenant))


class Static:
    """A batch waits for its last: nobody joins once anybody in it has decoded. `inner` says who comes into it."""

    def __init__(self, inner: Policy):
        self.inner = inner
        self.steady = getattr(inner, "steady", False)
        self.kind = f"static {getattr(inner, 'kind', type(inner).__qualname__)}"

    def __call__(self, state: State) -> Wishes:
        if any(entry.known > entry.prompt + 1 for entry in state.running):
            wishes = self.inner(replace(state, waiting=()))
            if not state.waiting:
                return wishes
            head, count = state.waiting[0], len(state.running)
            words = f"a batch runs, and {count} sequences in it have not ended"
            return replace(wishes, tokens=(*wishes.tokens, (head.id, 0)), because={head.id: words})
        wishes = self.inner(state)
        decodes = {entry.id for entry in state.running if entry.decodes}
        if any(tokens and name not in decodes for name, tokens in wishes.tokens):  # the batch is still being gathered
            return replace(wishes, tokens=[(name, 0 if name in decodes else n) for name, n in wishes.tokens])
        return wishes


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
            if min(free) >= 0 and left > 0 and chunk > 0 and not blocked and state.seats(entry, places):
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


def _parted(running: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Those that decode, and those in prefill."""
    decodes: list[Entry] = []
    prefills: list[Entry] = []
    for entry in running:
        (decodes if entry.decodes else prefills).append(entry)
    return decodes, prefills


def _late(state: State, patience: int, entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Those of `entries` that are overdue, in order of arrival, and the others as they stand."""
    late: list[Entry] = []
    others: list[Entry] = []
    for entry in entries:
        (late if state.step - entry.since >= patience else others).append(entry)
    return sorted(late, key=lambda entry: entry.order), others


def _turn(state: State, patience: int, key: Callable[[Entry], Any]) -> Callable[[Entry], tuple]:
    def turn(entry: Entry) -> tuple:
        return (0, 0, entry.order) if state.step - entry.since >= patience else (1, key(entry), entry.order)

    return turn


def _in_turn(
    state: State, patience: int, entries: Iterable[Entry], key: Callable[[Entry], Any]
) -> Iterator[Entry]:
    """Who is overdue, then the others by `key`; sorted no further than it is looked at."""
    turn = _turn(state, patience, key)
    heap = [(turn(entry), entry) for entry in entries]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[1]


def _priority(entry: Entry) -> int:
    return entry.priority
