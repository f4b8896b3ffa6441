"""Manage the states of recurrent layers (state-space, linear attention, short convolutions) as pages. Integers only.

    tokens     | 0 ........ S | S ....... 2S | 2S ... c        c are computed; a page has room for S tokens
    pages        snapshot       snapshot       state           index i: the state after the last computed token there
    spare                                      state, ...      written by the next step: after its last known token, and
                                                               after each draft token that it verifies
    snapshots                                                  written by the next step, where it ends a page on the way

A step never overwrites the state that it reads. So a failed or interrupted step can be computed again, forked sequences
share a state until they continue, and rejected drafts do not change the state after the last accepted token. Snapshots
serve the prefix cache. They only take pages that the rest of the step does not need, the latest first.
"""

from __future__ import annotations

from workbench.kv_cache.pages import NULL_PAGE, PagePool
from workbench.request import Sequence, StatePages


def state_page(pages: list[int], computed: int, page_size: int) -> int:
    """Return the page with the state after `computed` tokens; the null page at the beginning of a text."""
    return pages[(computed - 1) // page_size] if computed else NULL_PAGE


def snapshot_places(start: int, known: int, page_size: int) -> range:
    """Return the indices, in the page list, of the pages that end within a step over [start, known), before its last
    token.
    """
    return range(start // page_size, (known - 1) // page_size)


def written_states(states: StatePages, start: int, known: int, end: int, page_size: int) -> dict[int, int]:
    """Return, by number of tokens, the pages to which a step over [start, end) writes the state after these tokens.

    Args:
        states: the pages that were allocated.
        start: computed tokens before the step.
        known: tokens after it without draft tokens.
        end: tokens after it, with draft tokens.
        page_size: tokens per page.
    """
    places = snapshot_places(start, known, page_size)
    written = {(place + 1) * page_size: page for place, page in states.snapshots.items() if place in places}
    return written | dict(zip(range(known, end + 1), states.spare, strict=False))


def commit_states(
    sequence: Sequence, group: int, pool: PagePool, start: int, known: int, end: int, page_size: int
) -> None:
    """Keep the states that a step over [start, end) wrote, up to the computed tokens of `sequence`.

    The page with the previous state becomes the spare page if it has no other reference; other pages are released.
    """
    states, pages, computed = sequence.states[group], sequence.pages[group], sequence.num_computed_tokens
    written = written_states(states, start, known, end, page_size)
    left = set(states.all)
    for tokens, page in sorted(written.items()):
        if tokens > computed or (tokens < computed and tokens % page_size):
            continue
        place = (tokens - 1) // page_size
        pages += [NULL_PAGE] * (place + 1 - len(pages))
        if pages[place] != NULL_PAGE:
            left.add(pages[place])
        pages[place] = page
        left.discard(page)
    own = [page for page in left if pool.ref_count(page) == 1]
    states.spare, states.snapshots = own[:1], {}
    pool.release(page for page in left if page not in states.spare)
    if not own:
        sequence.allocated_until = 0  # the next step needs a page to write to
