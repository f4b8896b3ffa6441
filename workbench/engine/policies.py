"""Built-in scheduling policies. Each is a value: the name under `schedule.policy`, and its settings.

No request starves under any of them. `fcfs` schedules in order of arrival. Under the others a request is starving once
`starvation_limit` steps have passed since its arrival, and aging takes over: - `shortest_prompt`, `priority` and `fair`
keep their own order even under overload. One admission in four goes to the
  oldest starving request. Among running requests only the oldest, if starving, goes before the policy's order and is
  preempted last. So the oldest request is admitted at the fourth admission at the latest, and then gets all it needs.
- `prefill_first` and `decode_first` schedule all starving requests first, in order of arrival. `starvation_limit` is
  also the longest wait that they may cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.engine.policy import Entry, Policy, State, Wishes
from workbench.engine.serving import in_turn, overdue, parted, serve, sharing, spared, waiting_overdue
from workbench.shown import Brief

Steps = Annotated[int, Field(ge=1)]


class BuiltIn(Brief, BaseModel):
    """A policy that says in parts what it would say of a state in which everybody decodes: such a state is decided
    without an entry for each (see `Scheduler.plan`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steady: ClassVar[bool] = True
    padded: ClassVar[bool] = False

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = parted(state.running)
        return serve(state, self.turns(state, prefills), self.keep(state), decodes)

    def turns(self, state: State, prefills: list[Entry]) -> Iterator[Entry]:
        """Yield `prefills` and those that wait, in the order in which they are served."""
        return chain(prefills, state.waiting)

    def keep(self, state: State) -> Sequence[Entry] | None:
        """Return those that run in the order in which they hold on to their pages; None for that of arrival. It
        depends on who runs, on nothing that changes of them, and on whether the oldest of them is overdue."""
        return None

    def head(self, state: State) -> tuple[Entry | None, str]:
        """Return who begins next where everybody decodes; and why not yet, where that is the policy's doing."""
        return next(iter(self.turns(state, [])), None), ""


class FCFS(BuiltIn):
    """First come, first served: decodes, then prefills in the tokens that are left (Sarathi-Serve's mixed steps)."""

    kind: Literal["fcfs"] = "fcfs"


class PrefillFirst(BuiltIn):
    """Prefills before decodes, which get what is left of the step: the first token comes soon, the others may stall."""

    kind: Literal["prefill_first"] = "prefill_first"
    patience: Steps = 1000

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = parted(state.running)
        late, others = overdue(state, self.patience, decodes)
        return serve(state, self.turns(state, prefills), decodes=late, after=others)


class DecodeFirst(BuiltIn):
    """As long as anything decodes nobody is prefilled, but for who has been here for `patience` steps: even gaps
    between tokens, and a first token that comes late."""

    kind: Literal["decode_first"] = "decode_first"
    patience: Steps = 64

    def __call__(self, state: State) -> Wishes:
        decodes, prefills = parted(state.running)
        if not decodes:
            return serve(state, chain(prefills, state.waiting))
        late = self.turns(state, prefills)
        first = next(late, None)
        wishes = serve(state, () if first is None else chain((first,), late), decodes=decodes)
        if first is not None or not state.waiting:
            return wishes
        head, words = self._not_yet(state, len(decodes))
        return replace(wishes, tokens=(*wishes.tokens, (head.id, 0)), because={head.id: words})

    def turns(self, state: State, prefills: list[Entry]) -> Iterator[Entry]:
        """As far as they are overdue."""
        late = overdue(state, self.patience, prefills)[0]
        return heapq.merge(late, waiting_overdue(state, self.patience), key=_order)

    def head(self, state: State) -> tuple[Entry | None, str]:
        first = next(self.turns(state, []), None)
        return (first, "") if first is not None or not state.waiting else self._not_yet(state, len(state.running))

    def _not_yet(self, state: State, decodes: int) -> tuple[Entry, str]:
        head = state.waiting[0]
        waited = state.step - head.since
        return head, f"{decodes} sequences decode, and it has waited {waited} of {self.patience} steps"


class ShortestPrompt(BuiltIn):
    """Short prompts are admitted and prefilled first."""

    kind: Literal["shortest_prompt"] = "shortest_prompt"
    patience: Steps = 1000

    def turns(self, state: State, prefills: list[Entry]) -> Iterator[Entry]:
        return in_turn(state, self.patience, prefills, _todo)


class Priority(BuiltIn):
    """The smaller `Request.priority`, the sooner; the largest gives way first when pages run out."""

    kind: Literal["priority"] = "priority"
    patience: Steps = 1000

    def turns(self, state: State, prefills: list[Entry]) -> Iterator[Entry]:
        return in_turn(state, self.patience, prefills, _priority)

    def keep(self, state: State) -> Sequence[Entry]:
        first = spared(state, self.patience, state.running)
        keep = sorted(state.running, key=_priority)  # stable: in order of arrival where it is equal
        if first is not None:
            keep.remove(first)
            keep.insert(0, first)
        return keep


class Fair(BuiltIn):
    """Next comes the tenant for whom the fewest tokens were computed, with its oldest request (the virtual token
    counter of Sheng et al., 2024)."""

    kind: Literal["fair"] = "fair"
    patience: Steps = 1000

    def turns(self, state: State, prefills: list[Entry]) -> Iterator[Entry]:
        return chain(prefills, sharing(state, self.patience, self._by_tenant(state)))

    def _by_tenant(self, state: State) -> Iterator[Entry]:
        queues = state.tenants()
        heap = [(state.served[tenant], queue[0].order, tenant, 0) for tenant, queue in queues.items()]
        heapq.heapify(heap)
        while heap:
            tokens, _, tenant, place = heapq.heappop(heap)
            entry, place = queues[tenant][place], place + 1
            yield entry
            if place < len(queues[tenant]):
                heapq.heappush(heap, (tokens + entry.todo, queues[tenant][place].order, tenant, place))


class Static:
    """Static batching: no request joins once any of the batch has decoded; `inner` chooses its members.

    The batch is gathered while its prompts are computed, which may take several steps without a decode. A finished
    request leaves. In a `padded` batch its row is computed until the last finishes (request-level scheduling: Yu et al.
    2022, Orca, section 3).
    """

    def __init__(self, inner: Policy, padded: bool = False):
        self.inner, self.padded = inner, padded
        self.steady = getattr(inner, "steady", False)
        self.patience = getattr(inner, "patience", None)
        self.kind = f"{'padded' if padded else 'static'} {getattr(inner, 'kind', type(inner).__qualname__)}"

    def __call__(self, state: State) -> Wishes:
        if state.running and self._complete(state):
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

    def _complete(self, state: State) -> bool:
        if any(entry.known > entry.prompt + 1 for entry in state.running):
            return True
        # Prompts that end with their prefill make room for others: without a bound it would be gathered for ever. Whole
        # prompts fill the steps they are laid into by half at least.
        prompts = sum(entry.known for entry in state.running)
        return state.step - min(entry.began for entry in state.running) > 2 * -(-prompts // state.chunk)


def _priority(entry: Entry) -> int:
    return entry.priority


def _todo(entry: Entry) -> int:
    return entry.todo


def _order(entry: Entry) -> int:
    return entry.order
