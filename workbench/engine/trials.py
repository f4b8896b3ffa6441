"""Add draft tokens to a step's plan. Integers only."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.cache.holdings import Holdings
from workbench.engine.plan import Span


def with_drafts(
    spans: tuple[Span, ...], proposed: Mapping[str, tuple[int, ...]], holdings: Holdings, budget: int
) -> tuple[Span, ...]:
    """Return `spans` with proposed tokens to verify, as many as `max_num_batched_tokens` tokens and free pages allow;
    they preempt nothing."""
    left = budget - sum(span.length for span in spans)
    single, checks, longer = [], [], []
    for span in spans:
        drafts = proposed.get(span.sequence.request_id, ())[: max(0, left)] if span.decodes else ()
        while drafts and (missing := holdings.missing(span.sequence, len(drafts))) is not None:
            if holdings.short(missing) is None:
                holdings.take(span.sequence, len(drafts))
                break
            drafts = drafts[:-1]
        left -= len(drafts)
        if drafts:
            span = span._replace(length=span.length + len(drafts), drafts=drafts)
        (checks if drafts else longer if span.length > 1 else single).append(span)
    return (*single, *checks, *longer)
