"""Define the built-in scheduling policies, and the settings that name one or import a custom one.

Each built-in policy is a value: the name under `schedule.policy`, and its settings. No request starves under any of
them. `fcfs` schedules in order of arrival; so does `interleaved`, the default, but during the prefill of a long prompt
it gives later short prompts an eighth of each step. Under the other policies a request is starving once
`starvation_limit` steps have passed since its arrival, and aging applies:

- `shortest_prompt`, `priority`, `fair` and `deadline` keep their own order even under overload. One admission in four
  goes to the oldest starving request. Among running requests only the oldest, if starving, goes before the policy's
  order and is preempted last. So the oldest request is admitted at the fourth admission at the latest, and is then
  served first.
- `prefill_first` and `decode_first` schedule all starving requests first, in order of arrival. `starvation_limit`
bounds the delay that these policies can cause.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator

from workbench.custom import check_arity, load_custom
from workbench.errors import WorkbenchError, nearest
from workbench.request import CustomPart
from workbench.scheduler.ordering import (
    most_in_time,
    short_prompts,
    sorted_with_aging,
    starving,
    tokens_beside_short_prompts,
    with_aging,
)
from workbench.scheduler.policy import (
    Order,
    RequestView,
    RunningViews,
    SchedulerDecision,
    SchedulerState,
    SchedulingPolicy,
    Turn,
)
from workbench.scheduler.validate import items_of
from workbench.settings import Count, Settings, parse_setting

BatchingMode = Literal["continuous", "static", "padded"]


class BuiltInPolicy(Settings):
    """A built-in policy: it serves decodes first, then requests in the order of `turns`."""

    steady: ClassVar[bool] = True
    padded: ClassVar[bool] = False

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        return SchedulerDecision([state.decodes, self.turns(state)])

    def turns(self, state: SchedulerState) -> Iterable[RequestView]:
        """Return prefills and waiting requests in order of service."""
        return chain(state.prefills, state.waiting)


class FCFS(BuiltInPolicy):
    """First come, first served: decodes, then prefills with the remaining tokens (mixed steps as in Sarathi-Serve)."""

    kind: Literal["fcfs"] = "fcfs"


class Interleaved(BuiltInPolicy):
    """First come, first served, but during a prompt that takes more than a step, an eighth of each step's prefill
    tokens goes to later prompts that fit into a single step, in order of arrival.

    So a short prompt with a slot and pages only waits until these eighths have covered the earlier short prompts and
    its own tokens, however long the long prompt is. The long prompt takes at most 8/7 of its steps. A prompt that lacks
    slots or pages blocks later ones; without chunked prefill no step is shared.
    """

    kind: Literal["interleaved"] = "interleaved"

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        # A request that waits for another (a second prompt, beams) has no tokens to compute.
        head = next((entry for entry in self.turns(state) if entry.num_new_tokens), None)
        if head is None or not (tokens := tokens_beside_short_prompts(state, head)):
            return super().__call__(state)
        shared = Turn(head, tokens), short_prompts(state, head), head
        return SchedulerDecision([state.decodes, *shared, self.turns(state)])


class PrefillFirst(BuiltInPolicy):
    """Schedule prefills before decodes, which get the step's remaining tokens: early first tokens, but decodes may
    stall.
    """

    kind: Literal["prefill_first"] = "prefill_first"
    starvation_limit: Count = 1000  # steps after which a waiting request goes first

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        waiting = islice(state.waiting, max(1, state.limits.max_num_seqs - len(state.running) + 1))  # no more can start
        late = starving(state, self.starvation_limit, state.decodes)
        return SchedulerDecision([late, state.prefills, waiting, state.decodes])


class DecodeFirst(BuiltInPolicy):
    """Prefill no request while any request decodes, except after a wait of `starvation_limit` steps: even gaps between
    tokens, but late first tokens.
    """

    kind: Literal["decode_first"] = "decode_first"
    starvation_limit: Count = 64  # steps after which a waiting request goes first

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        if not state.decodes:
            return SchedulerDecision([state.prefills, state.waiting])
        late = [starving(state, self.starvation_limit, entries) for entries in (state.prefills, state.waiting)]
        reasons = {}
        for entry in state.waiting[:1]:
            waited = state.step - entry.arrival_step
            if waited < self.starvation_limit:
                steps = f"it has waited {waited} of {self.starvation_limit} steps"
                reasons[entry.request_id] = f"{len(state.decodes)} sequences decode, and {steps}"
        turns = heapq.merge(*late, key=_arrival_index)
        return SchedulerDecision([state.decodes, turns, state.waiting[:1]], reasons=reasons)


class ShortestPrompt(BuiltInPolicy):
    """Admit and prefill short prompts first."""

    kind: Literal["shortest_prompt"] = "shortest_prompt"
    starvation_limit: Count = 1000  # steps after which a waiting request goes first

    def turns(self, state: SchedulerState) -> Iterable[RequestView]:
        return sorted_with_aging(state, self.starvation_limit, _num_new_tokens)


class Priority(BuiltInPolicy):
    """Schedule the smallest `Request.priority` first; preempt the largest first when pages run out."""

    kind: Literal["priority"] = "priority"
    starvation_limit: Count = 1000  # steps after which a waiting request goes first

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        turns = sorted_with_aging(state, self.starvation_limit, _priority)
        return SchedulerDecision([state.decodes, turns], keep=self._keep(state))

    def _keep(self, state: SchedulerState) -> Iterator[RequestView]:
        yield from islice(starving(state, self.starvation_limit, state.running), 1)
        yield from sorted(state.running, key=_priority)  # stable: equal priorities stay in order of arrival


class Fair(BuiltInPolicy):
    """Schedule the oldest request of the tenant with the fewest computed tokens (the virtual token counter of Sheng et
    al., 2024).
    """

    kind: Literal["fair"] = "fair"
    starvation_limit: Count = 1000  # steps after which a waiting request goes first

    def turns(self, state: SchedulerState) -> Iterable[RequestView]:
        return chain(state.prefills, with_aging(state, self.starvation_limit, self._by_tenant(state)))

    def _by_tenant(self, state: SchedulerState) -> Iterator[RequestView]:
        queues = state.waiting_by_tenant()
        heap = [(state.served_tokens[tenant], queue[0].arrival_index, tenant, 0) for tenant, queue in queues.items()]
        heapq.heapify(heap)
        while heap:
            tokens, _, tenant, place = heapq.heappop(heap)
            entry, place = queues[tenant][place], place + 1
            yield entry
            if place < len(queues[tenant]):
                heapq.heappush(
                    heap, (tokens + entry.num_new_tokens, queues[tenant][place].arrival_index, tenant, place)
                )


class Deadline(BuiltInPolicy):
    """Serve as many requests as possible in time, i.e. with a first token within `ttft` seconds of their arrival.

    If all can be in time, they are served in order of arrival. If not, the requests with the longest prompts wait until
    no other request can still be in time (Moore, "An n job, one machine sequencing algorithm for minimizing the number
    of late jobs", 1968, with prefill times measured in earlier steps; slots and pages are assumed to be free). A
    preempted request that already has its first token goes first.
    """

    kind: Literal["deadline"] = "deadline"
    ttft: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # seconds from arrival to the first token
    starvation_limit: Count = 1000  # steps after which a waiting request goes first

    def turns(self, state: SchedulerState) -> Iterable[RequestView]:
        prefill_tokens = sum(entry.num_new_tokens for entry in state.prefills)
        begins = state.now + state.seconds_per_prefill_token * prefill_tokens
        waiting = with_aging(state, self.starvation_limit, most_in_time(state, self.ttft, begins))
        return chain(state.prefills, waiting)


class StaticBatching:
    """Static batching: no request joins a batch once one of its requests has decoded; `inner` chooses the members.

    The batch is formed while its prompts are computed, which may take several steps without decodes. A finished request
    leaves the batch; in a `padded` batch its row is computed until the last request finishes (request-level scheduling:
    Yu et al. 2022, Orca, section 3).
    """

    def __init__(self, inner: SchedulingPolicy, padded: bool = False):
        self.inner, self.padded = inner, padded
        self.steady = getattr(inner, "steady", False)
        self.starvation_limit = getattr(inner, "starvation_limit", None)
        self.kind = f"{'padded' if padded else 'static'} {getattr(inner, 'kind', type(inner).__qualname__)}"

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        if state.running and self._complete(state):
            decision = self.inner(replace(state, waiting=()))
            reason = f"a batch runs, and {len(state.running)} sequences in it have not ended"
            reasons = {entry.request_id: reason for entry in state.waiting[:1]}
            return replace(decision, order=chain(decision.order, state.waiting[:1]), reasons=reasons)
        decision = self.inner(state)
        # While the batch is formed, no request decodes as long as a prompt can be computed.
        num_requests = len(state.running) + len(state.waiting)
        return replace(decision, order=self._prefills(decision.order, num_requests))

    def _prefills(self, order: Order, num_requests: int) -> Iterator[RequestView | Turn]:
        for item in items_of(order, self.kind, num_requests):
            for turn in item if type(item) is RunningViews else (item,):
                request = turn.request if isinstance(turn, Turn) else turn
                if not (isinstance(request, RequestView) and request.is_decoding):
                    yield turn

    def _complete(self, state: SchedulerState) -> bool:
        if any(entry.num_tokens > entry.num_prompt_tokens + 1 for entry in state.running):
            return True
        # Requests that end with their prefill make room for others, so without a bound the batch would never be
        # complete. Whole prompts fill at least half of each step.
        prompts = sum(entry.num_tokens for entry in state.running)
        return state.step - min(entry.scheduled_step for entry in state.running) > 2 * -(
            -prompts // state.limits.max_chunk_tokens
        )


def _priority(entry: RequestView) -> int:
    return entry.priority


def _num_new_tokens(entry: RequestView) -> int:
    return entry.num_new_tokens


def _arrival_index(entry: RequestView) -> int:
    return entry.arrival_index


class CustomPolicy(Settings):
    """A user-defined policy: `path` is `package.module:Name` or `folder/file.py:Name`."""

    kind: Literal["custom"] = "custom"
    path: str
    arguments: dict[str, float | int | str | bool] = {}  # keyword arguments of its constructor


def _validate(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept a bare kind, a path, or a user-defined policy: a callable, or a class to instantiate."""
    if isinstance(value, type):
        value = value()
    if callable(value) and not isinstance(value, Settings):
        return value
    if isinstance(value, str):
        value = {"kind": "custom", "path": value} if ":" in value else {"kind": value}
    elif isinstance(value, dict) and "kind" not in value and "path" in value:
        value = {**value, "kind": "custom"}
    return validate(value)


PolicySetting = Annotated[
    Annotated[
        Interleaved | FCFS | PrefillFirst | DecodeFirst | ShortestPrompt | Priority | Fair | Deadline | CustomPolicy,
        Field(discriminator="kind"),
    ],
    WrapValidator(_validate),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(PolicySetting)
BUILT_IN_POLICIES: dict[str, type[Any]] = {
    cls.model_fields["kind"].default: cls
    for cls in (Interleaved, FCFS, PrefillFirst, DecodeFirst, ShortestPrompt, Priority, Fair, Deadline)
}


def parse_policy(value: Any, kind: BatchingMode = "continuous") -> SchedulingPolicy:
    """Build the policy that `value` describes (a name, settings, an import path or a callable), for a batching mode.

    Raises:
        WorkbenchError: names the invalid setting.
    """
    setting = _setting(value)
    policy = _load_custom_policy(setting) if isinstance(setting, CustomPolicy) else cast(SchedulingPolicy, setting)
    if kind not in get_args(BatchingMode):
        known = ", ".join(get_args(BatchingMode))
        raise WorkbenchError(f"unknown schedule {kind!r}{nearest(kind, get_args(BatchingMode))}; known: {known}")
    return policy if kind == "continuous" else StaticBatching(policy, padded=kind == "padded")


def _setting(value: Any) -> Any:
    hint = nearest(value, BUILT_IN_POLICIES) if isinstance(value, str) else ""
    known = f"give {', '.join(BUILT_IN_POLICIES)}, or a path (mine.py:my_policy){hint}"
    return parse_setting(_ADAPTER, value, "policy", known)


def _load_custom_policy(setting: CustomPolicy) -> SchedulingPolicy:
    made = load_custom(CustomPart(path=setting.path, arguments=setting.arguments))
    if not callable(made):
        raise WorkbenchError(f"policy {setting.path}: not callable; it needs __call__(self, state)")
    check_arity(made, 1, f"policy {setting.path}", "(state)")
    return cast(SchedulingPolicy, made)
