"""Provide building blocks of policies: share a step between a long prompt and later short prompts, and age starving
requests.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, islice, takewhile
from typing import Any

from workbench.scheduler.policy import RequestView, SchedulerState

AGING_INTERVAL = 4  # every n-th admission goes to the oldest starving request
SHORT_SHARE = 8  # with a long prompt, one in this many prefill tokens is for later short prompts
CACHE_LOOKS = 16  # maximum cache lookups per step to find prompts that cached tokens make short


def tokens_beside_short_prompts(state: SchedulerState, head: RequestView) -> int:
    """Return the number of prefill tokens for `head`, the oldest request with tokens to prefill, if one in
    `SHORT_SHARE` prefill tokens of the step goes to later short prompts; 0 if `head` needs no more tokens than that
    number.
    """
    tokens = min(state.limits.max_chunk_tokens, state.limits.max_num_batched_tokens - len(state.decodes))
    share = max(0, tokens) // SHORT_SHARE
    if not state.limits.chunked_prefill or not share or head.num_new_tokens <= tokens - share:
        return 0
    return tokens - share if state.num_new_tokens(head) > tokens - share else 0


def short_prompts(state: SchedulerState, head: RequestView) -> Iterator[RequestView]:
    """Yield requests with short prompts except `head`: running ones, then waiting ones, each in order of arrival.

    A prompt is short if it fits into one step's prefill tokens without its cached tokens. While prompt tokens of `head`
    are scored, other scored prompts are left out, because `head` takes all scored tokens of the step.
    """
    longest = state.limits.max_chunk_tokens
    running = (entry for entry in state.prefills if 0 < entry.num_new_tokens <= longest)
    for entry in chain(running, _short_waiting(state)):
        if entry.arrival_index != head.arrival_index and not (entry.scores_prompt and head.scores_prompt):
            yield entry


def _short_waiting(state: SchedulerState) -> Iterator[RequestView]:
    """Yield waiting requests with short prompts in order of arrival. Prompts that are short only because of cached
    tokens are found among the oldest requests only.
    """
    longest = state.limits.max_chunk_tokens
    short = takewhile(lambda entry: entry.num_new_tokens <= longest, state.waiting_by(_is_longer_than(longest)))
    long = (entry for entry in islice(state.waiting, CACHE_LOOKS) if entry.num_new_tokens > longest)
    cached = (entry for entry in long if state.num_new_tokens(entry) <= longest)
    return heapq.merge(short, cached, key=lambda entry: entry.arrival_index)


@cache
def _is_longer_than(tokens: int) -> Callable[[RequestView], bool]:
    """Return the same key function each time, so that the sorted order of waiting requests is kept between steps."""
    return lambda entry: entry.num_new_tokens > tokens


def starving(state: SchedulerState, starvation_limit: int, entries: Iterable[RequestView]) -> Iterator[RequestView]:
    """Yield the requests in `entries`, which are in order of arrival, that have waited at least `starvation_limit`
    steps.
    """
    since = state.step - starvation_limit
    return takewhile(lambda entry: entry.arrival_step <= since, entries)


def sorted_with_aging(
    state: SchedulerState, starvation_limit: int, key: Callable[[RequestView], Any]
) -> Iterator[RequestView]:
    """Merge prefills and waiting requests by `key`, with aging: the oldest prefill comes first if it is starving.

    Waiting requests are kept in this order (`SchedulerState.waiting_by`) and merged lazily; starving ones are placed by
    `with_aging`.
    """
    waiting, prefills = state.waiting_by(key), state.prefills
    if not prefills:
        return with_aging(state, starvation_limit, iter(waiting))
    first = next(starving(state, starvation_limit, prefills), None)

    def turn(entry: RequestView) -> tuple[bool, Any, int]:
        return first is None or entry.arrival_index != first.arrival_index, key(entry), entry.arrival_index

    return with_aging(state, starvation_limit, heapq.merge(sorted(prefills, key=turn), waiting, key=turn))


def with_aging(state: SchedulerState, starvation_limit: int, order: Iterator[RequestView]) -> Iterator[RequestView]:
    """Yield the requests in `order`, but give one in AGING_INTERVAL admissions to the oldest waiting request if it is
    starving.
    """
    begun, gone = state.num_admitted, set[str]()
    late = starving(state, starvation_limit, state.waiting)
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
    """Yield waiting requests in three parts, each in order of arrival: requests that already have their first token,
    the largest set of requests that can get it in time, and the rest.

    The largest set is chosen by Moore's algorithm (1968): take requests in order of arrival, and whenever one would be
    late, drop the longest request taken. Only requests of the last `seconds` are considered.

    Args:
        state: the scheduler's state, with the seconds per prefill token.
        seconds: limit from arrival to the first token, the same for all.
        begins: the earliest start time.
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
    """Return whether all of `young` are in time in this order even without cached tokens, which would need a cache
    lookup for each.
    """
    ends, rate = begins, state.seconds_per_prefill_token
    for entry in young:
        ends += rate * entry.num_new_tokens
        if ends > entry.arrival_time + seconds:
            return False
    return True


def _chosen(state: SchedulerState, young: list[RequestView], seconds: float, begins: float) -> list[RequestView]:
    """Return the largest subset of `young` (in order of arrival) that can be in time."""
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
