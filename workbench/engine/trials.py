"""Drafted tokens in a step's plan. Integers only."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.cache.holdings import Holdings
from workbench.engine.plan import Span


def with_drafts(
    spans: tuple[Span, ...], proposed: Mapping[str, tuple[int, ...]], holdings: Holdings, budget: int
) -> tuple[Span, ...]:
    """`spans` that check proposed tokens too, as many as are left of `budget` tokens and as free pages hold. Nobody
    gives way to them: a token on trial is worth less than one that is known."""
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
