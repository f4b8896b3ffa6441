"""Built-in scheduling policies, and the settings that name one or import a custom one.

Each built-in policy is a value: the name under `schedule.policy`, and its settings. No request starves under any of
them. `fcfs` schedules in order of arrival; `interleaved`, the default, does so too, but while a long prompt is read it
gives short ones behind it a share of each step. Under the others a request is starving once `starvation_limit` steps
have passed since its arrival, and aging takes over:

- `shortest_prompt`, `priority`, `fair` and `deadline` keep their own order even under overload. One admission in four
  goes to the oldest starving request. Among running requests only the oldest, if starving, goes before the policy's
  order and is preempted last. So the oldest request is admitted at the fourth admission at the latest, and then gets
  all it needs.
- `prefill_first` and `decode_first` schedule all starving requests first, in order of arrival. `starvation_limit` is
  also the longest wait that they may cost.
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
    """A policy that serves decodes first, then `turns`."""

    steady: ClassVar[bool] = True
    padded: ClassVar[bool] = False

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        return SchedulerDecision([state.decodes, self.turns(state)])

    def turns(self, state: SchedulerState) -> Iterable[RequestView]:
        """Return prefills and waiting requests in order of service."""
        return chain(state.prefills, state.waiting)


class FCFS(BuiltInPolicy):
    """First come, first served: decodes, then prefills in the tokens that are left (Sarathi-Serve's mixed steps)."""

    kind: Literal["fcfs"] = "fcfs"


class Interleaved(BuiltInPolicy):
    """First come, first served, but beside a prompt that takes more than a step, an eighth of each step's prefill
    tokens is for prompts behind it that fit into a single step, in order of arrival.

    So a short prompt with a slot and pages waits until these eighths have held the short ones before it and its own
    tokens, however long the prompt before them all is. That one takes at most 8/7 of its steps. A prompt that lacks
    slots or pages holds up those behind it; nothing is shared where prefills are whole.
    """

    kind: Literal["interleaved"] = "interleaved"

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        # A request that waits for another (a second prompt, beams) has nothing to compute.
        head = next((entry for entry in self.turns(state) if entry.num_new_tokens), None)
        if head is None or not (tokens := tokens_beside_short_prompts(state, head)):
            return super().__call__(state)
        shared = Turn(head, tokens), short_prompts(state, head), head
        return SchedulerDecision([state.decodes, *shared, self.turns(state)])


class PrefillFirst(BuiltInPolicy):
    """Prefills before decodes, which get what is left of the step: the first token comes soon, the others may stall."""

    kind: Literal["prefill_first"] = "prefill_first"
    starvation_limit: Count = 1000  # steps after which a waiting request goes first

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        waiting = islice(state.waiting, max(1, state.limits.max_num_seqs - len(state.running) + 1))  # more cannot start
        late = starving(state, self.starvation_limit, state.decodes)
        return SchedulerDecision([late, state.prefills, waiting, state.decodes])


class DecodeFirst(BuiltInPolicy):
    """Prefill no request as long as any decodes, except one that has waited for `starvation_limit` steps: the gaps
    between tokens are even, and the first token comes late."""

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
        yield from sorted(state.running, key=_priority)  # stable: in order of arrival where it is equal


class Fair(BuiltInPolicy):
    """Schedule the oldest request of the tenant for whom the fewest tokens were computed (the virtual token
    counter of Sheng et al., 2024)."""

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
    """Serve as many requests as can be served in time: with a first token within `ttft` seconds of their arrival.

    Where all can, they are served in order of arrival. Where not all can, those with the longest prompts wait until no
    other may still be in time (Moore, "An n job, one machine sequencing algorithm for minimizing the number of late
    jobs", 1968, with the time of a prompt as measured in the steps so far; slots and pages are taken to be free). A
    request that has had its first token and was preempted goes first.
    """

    kind: Literal["deadline"] = "deadline"
    ttft: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # seconds
    starvation_limit: Count = 1000  # steps after which a waiting request goes first

    def turns(self, state: SchedulerState) -> Iterable[RequestView]:
        prefill_tokens = sum(entry.num_new_tokens for entry in state.prefills)
        begins = state.now + state.seconds_per_prefill_token * prefill_tokens
        waiting = with_aging(state, self.starvation_limit, most_in_time(state, self.ttft, begins))
        return chain(state.prefills, waiting)


class StaticBatching:
    """Static batching: no request joins once any of the batch has decoded; `inner` chooses its members.

    The batch is gathered while its prompts are computed, which may take several steps without a decode. A finished
    request leaves. In a `padded` batch its row is computed until the last finishes (request-level scheduling: Yu et al.
    2022, Orca, section 3).
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
        # While the batch is gathered, no request decodes as long as any prompt can be computed.
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
        # Requests that end with their prefill make room for others: without a bound the batch would be gathered for
        # ever. Whole prompts fill at least half of each step.
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
    arguments: dict[str, float | int | str | bool] = {}  # arguments to build it with, by name


def _validate(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Accept a kind alone or a path, and a policy of one's own: a callable, or a class to build."""
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
    """Build the policy given by name, settings, import path or callable, for a batching mode.

    Raises:
        WorkbenchError: naming what is wrong.
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
