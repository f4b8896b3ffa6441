"""Building blocks of policies: schedule requests in order within a step's tokens, slots and pages, share a step between
a long prompt and the short ones behind it, and age requests that starve."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice, takewhile
from typing import Any

from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState

AGING_INTERVAL = 4  # one admission in this many goes to the oldest starving request
SHORT_SHARE = 8  # beside a long prompt, one prefill token in this many is for short prompts behind it
CACHE_LOOKS = 16  # waiting requests whose cached tokens are looked up to see whether what is left is short


def schedule_in_order(
    state: SchedulerState,
    order: Iterable[RequestView],
    keep_order: Iterable[RequestView] | None = None,
    decodes: Sequence[RequestView] = (),
    late_decodes: Sequence[RequestView] = (),
) -> SchedulerDecision:
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
    left, chunk, free = state.max_num_batched_tokens, state.max_prefill_tokens, state.free_pages
    free_slots = -1  # not computed yet
    unasked = len(state.running) - len(decodes) - len(late_decodes)
    tokens = {entry.request_id: 1 for entry in decodes[:left]}
    left -= len(tokens)
    begin: list[tuple[str, int]] = []
    closed = blocked = False
    for entry in order:
        if entry.is_running:
            unasked -= 1
            if entry.num_new_tokens == 1:
                length = min(1, left)
            else:
                length = 0 if blocked else state.chunk_length(entry.num_new_tokens, left, chunk)
                blocked |= entry.num_new_tokens > length == 0
                chunk -= length
            tokens[entry.request_id] = length
        elif closed:
            if not unasked:
                break
            continue
        else:
            length = 0
            free_slots = state.free_slots if free_slots < 0 else free_slots
            if min(free) >= 0 and left > 0 and chunk > 0 and not blocked and free_slots >= entry.slots_needed:
                needs = state.pages_needed[entry.request_id]
                if all(count <= pages for count, pages in zip(needs, free, strict=True)):
                    length = state.chunk_length(state.num_new_tokens(entry), left, chunk)
            if length:
                free_slots -= entry.num_sequences
                free = tuple(pages - count for count, pages in zip(needs, free, strict=True))
                chunk -= length
            closed = not length
            begin.append((entry.request_id, length))
        left -= length
    tokens |= {entry.request_id: 1 for entry in late_decodes[:left]}
    given = tokens.get
    if keep_order is None and len(decodes) == len(tokens) == len(state.running):
        scheduled = list(tokens.items())
    else:
        scheduled = [
            (entry.request_id, given(entry.request_id, 0))
            for entry in (state.running if keep_order is None else keep_order)
        ]
    scheduled += begin
    return SchedulerDecision(scheduled)


def share_with_short_prompts(
    state: SchedulerState, head: RequestView, decodes: Sequence[RequestView], prefills: Sequence[RequestView]
) -> SchedulerDecision | None:
    """Schedule a long prompt and, with one prefill token in `SHORT_SHARE`, the short prompts behind it.

    A prompt is short if one step's prefill tokens hold it, cached tokens subtracted. It is long if it exceeds this
    step's prefill tokens less the share. Short ones have their turns in order of arrival, running ones first; one that
    lacks slots or pages holds up those behind it.

    Args:
        state: the scheduler's state.
        head: the oldest request with tokens to prefill, running or waiting.
        decodes: running requests that decode: each gets one token first.
        prefills: the other running requests, in order of arrival.

    Returns:
        The decision; None where there is nothing to share: `head` is not long or cannot start, no short one can be
        computed, or the step has fewer than `SHORT_SHARE` tokens for prefills.
    """
    longest = state.max_prefill_tokens
    budget = min(longest, state.max_num_batched_tokens - len(decodes))
    share = left = max(0, budget) // SHORT_SHARE
    if state.whole_prefills or not share or head.num_new_tokens <= budget - share:
        return None
    todo, slots = state.num_new_tokens(head), state.free_slots
    if todo <= budget - share:
        return None
    starting = [] if head.is_running else [head]
    if starting and (slots < head.slots_needed or not state.fits(head)):
        return None
    slots -= sum(entry.num_sequences for entry in starting)
    lengths = {entry.request_id: 1 for entry in decodes}
    next_in_line = None
    for entry in chain((each for each in prefills if 1 < each.num_new_tokens <= longest), _short_waiting(state)):
        if not left:
            break
        if entry is head or entry.scores_prompt and head.scores_prompt:  # the head takes all tokens that are scored
            continue
        if not entry.is_running:
            if slots < entry.slots_needed or not state.fits(*starting, entry):
                next_in_line = entry
                break
            starting.append(entry)
            slots -= entry.num_sequences
        lengths[entry.request_id] = min(state.num_new_tokens(entry), left)
        left -= lengths[entry.request_id]
    if left == share:
        return None
    lengths[head.request_id] = min(todo, budget - share + left)
    scheduled = [(entry.request_id, lengths.get(entry.request_id, 0)) for entry in (*state.running, *starting)]
    if next_in_line is None:
        begun = {entry.request_id for entry in starting}
        next_in_line = next((entry for entry in state.waiting if entry.request_id not in begun), None)
    return SchedulerDecision(scheduled if next_in_line is None else [*scheduled, (next_in_line.request_id, 0)])


def _short_waiting(state: SchedulerState) -> Iterator[RequestView]:
    """Yield waiting requests with short prompts in order of arrival. Of those that only cached tokens make short, the
    oldest are found."""
    longest = state.max_prefill_tokens
    short = takewhile(lambda entry: entry.num_new_tokens <= longest, state.waiting_by(_is_longer_than(longest)))
    long = (entry for entry in islice(state.waiting, CACHE_LOOKS) if entry.num_new_tokens > longest)
    known = (entry for entry in long if state.num_new_tokens(entry) <= longest)
    return heapq.merge(short, known, key=lambda entry: entry.arrival_index)


@cache
def _is_longer_than(tokens: int) -> Callable[[RequestView], bool]:
    """Return the same key each time, so that the order of waiting requests is kept from step to step."""
    return lambda entry: entry.num_new_tokens > tokens


def split_decodes(running: Sequence[RequestView]) -> tuple[list[RequestView], list[RequestView]]:
    """Split running requests into decodes and prefills."""
    decodes = [entry for entry in running if entry.num_new_tokens == 1]
    prefills = [entry for entry in running if entry.num_new_tokens != 1] if len(decodes) < len(running) else []
    return decodes, prefills


def split_starving(
    state: SchedulerState, starvation_limit: int, entries: Iterable[RequestView]
) -> tuple[list[RequestView], list[RequestView]]:
    """Split `entries` into those that have waited `starvation_limit` steps since arrival, in order of arrival, and
    the others."""
    entries, since = list(entries), state.step - starvation_limit
    late = [entry for entry in entries if entry.arrival_step <= since]
    others = [entry for entry in entries if entry.arrival_step > since] if late else entries
    return sorted(late, key=lambda entry: entry.arrival_index), others


def starving_waiting(state: SchedulerState, starvation_limit: int) -> Iterator[RequestView]:
    """Yield waiting requests that are starving, oldest first."""
    since = state.step - starvation_limit
    return takewhile(lambda entry: entry.arrival_step <= since, state.waiting)


def oldest_starving(state: SchedulerState, starvation_limit: int, entries: Sequence[RequestView]) -> RequestView | None:
    """Return the oldest of `entries`, which are in order of arrival, if it is starving."""
    return entries[0] if entries and state.step - entries[0].arrival_step >= starvation_limit else None


def sorted_with_aging(
    state: SchedulerState, starvation_limit: int, prefills: list[RequestView], key: Callable[[RequestView], Any]
) -> Iterator[RequestView]:
    """Merge `prefills` and waiting requests by `key`, with aging: a starving request that is the oldest of `prefills`
    comes first.

    Waiting requests keep this order (`SchedulerState.waiting_by`) and are merged lazily; starving ones as `with_aging`
    says.
    """
    waiting = state.waiting_by(key)
    if not prefills:
        return with_aging(state, starvation_limit, iter(waiting))
    first = oldest_starving(state, starvation_limit, prefills)

    def turn(entry: RequestView) -> tuple[bool, Any, int]:
        return entry is not first, key(entry), entry.arrival_index

    return with_aging(state, starvation_limit, heapq.merge(sorted(prefills, key=turn), waiting, key=turn))


def with_aging(state: SchedulerState, starvation_limit: int, order: Iterator[RequestView]) -> Iterator[RequestView]:
    """Yield `order`, but give one in AGING_INTERVAL admissions to the oldest waiting request if it is starving."""
    begun, gone = state.num_admitted, set[str]()
    late = starving_waiting(state, starvation_limit)
    for entry in order:
        if entry.request_id in gone:
            continue
        if not entry.is_running:
            oldest = (
                next((each for each in late if each.request_id not in gone), entry)
                if begun % AGING_INTERVAL == 0
                else entry
            )
            if oldest is not entry:
                gone.add(oldest.request_id)
                begun += 1
                yield oldest
            gone.add(entry.request_id)
            begun += 1
        yield entry


def most_in_time(state: SchedulerState, seconds: float, begins: float) -> Iterator[RequestView]:
    """Yield waiting requests: those that have had their first token, then the most that can have it in time, then the
    others, each in order of arrival.

    The most are chosen as Moore does (1968): requests are taken in order of arrival, and whenever one would be late,
    the longest of those taken is left out. Only requests that arrived within the last `seconds` are looked at.

    Args:
        state: the scheduler's state, with the seconds that a token of a prompt takes.
        seconds: from arrival to the first token, the same for all.
        begins: the time when the first of them could begin.
    """
    ready = takewhile(lambda entry: entry.num_tokens > entry.num_prompt_tokens, state.waiting_by(_lacks_first_token))
    before = set[str]()
    for entry in ready:
        before.add(entry.request_id)
        yield entry
    if state.seconds_per_prefill_token:
        arrivals = state.waiting_by(_arrival_time)
        oldest = bisect.bisect_left(arrivals, begins, key=lambda entry: entry.arrival_time + seconds)
        young = [entry for entry in arrivals[oldest:] if entry.num_tokens <= entry.num_prompt_tokens]
        in_time = young if _all_in_time(state, young, seconds, begins) else _chosen(state, young, seconds, begins)
        yield from in_time
        before |= {entry.request_id for entry in in_time}
    yield from (entry for entry in state.waiting if entry.request_id not in before)


def _all_in_time(state: SchedulerState, young: list[RequestView], seconds: float, begins: float) -> bool:
    """Return whether all of `young` are in time in this order even without cached tokens, which take a look at the
    prefix cache for each."""
    ends, rate = begins, state.seconds_per_prefill_token
    for entry in young:
        ends += rate * entry.num_new_tokens
        if ends > entry.arrival_time + seconds:
            return False
    return True


def _chosen(state: SchedulerState, young: list[RequestView], seconds: float, begins: float) -> list[RequestView]:
    """Return the most of `young`, which are in order of arrival, that can be in time."""
    taken: list[tuple[float, int, RequestView]] = []  # a heap, the longest first
    ends = begins
    for entry in young:
        takes = state.seconds_per_prefill_token * state.num_new_tokens(entry)
        ends += takes
        heapq.heappush(taken, (-takes, -entry.arrival_index, entry))
        if ends > entry.arrival_time + seconds:
            ends += heapq.heappop(taken)[0]
    return sorted((entry for _, _, entry in taken), key=_arrival_time)


def _lacks_first_token(entry: RequestView) -> bool:
    return entry.num_tokens <= entry.num_prompt_tokens


def _arrival_time(entry: RequestView) -> tuple[float, int]:
    return entry.arrival_time, entry.arrival_index
