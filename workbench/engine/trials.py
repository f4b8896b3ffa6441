"""Add draft tokens to a step's plan. Integers only."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.cache.holdings import KVCacheManager
from workbench.engine.plan import Span


def add_drafts(
    spans: tuple[Span, ...], proposed: Mapping[str, tuple[int, ...]], kv_cache_manager: KVCacheManager, max_num_batched_tokens: int
) -> tuple[Span, ...]:
    """Return `spans` with proposed tokens to verify, as many as `max_num_batched_tokens` tokens and free pages allow;
    they preempt nothing."""
    left = max_num_batched_tokens - sum(span.length for span in spans)
    single, checks, longer = [], [], []
    for span in spans:
        drafts = proposed.get(span.sequence.request_id, ())[: max(0, left)] if span.is_decode else ()
        while drafts and (missing := kv_cache_manager.pages_to_allocate(span.sequence, len(drafts))) is not None:
            if kv_cache_manager.first_exhausted_group(missing) is None:
                kv_cache_manager.allocate(span.sequence, len(drafts))
                break
            drafts = drafts[:-1]
        left -= len(drafts)
        if drafts:
            span = span._replace(length=span.length + len(drafts), draft_token_ids=drafts)
        (checks if drafts else longer if span.length > 1 else single).append(span)
    return (*single, *checks, *longer)
