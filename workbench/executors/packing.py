"""Pack a plan into tensors, and wait for its logits. Decodes are padded to a few sizes (buckets), so that code compiled
for one size is reused for many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.recurrent import state_page, written_states
from workbench.scheduler.plan import Span, StepPlan

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MIN_TABLE_WIDTH = 2  # torch.compile treats a dimension of one as a special case; two keeps it symbolic


def bucket_for(rows: int) -> int:
    """Return the smallest bucket that is at least `rows`; beyond the largest bucket, the next multiple of it."""
    last = DECODE_BUCKETS[-1]
    return next((size for size in DECODE_BUCKETS if size >= rows), -(-rows // last) * last)


def verify_bucket_for(rows: int) -> int:
    """Return the bucket for `rows` rows of a verification step, in which each row costs time: `rows` itself up to 8,
    then the next multiple of 16.
    """
    return rows if rows <= 8 else -(-rows // 16) * 16 if rows <= DECODE_BUCKETS[-1] else bucket_for(rows)


def pack_batch(plan: StepPlan, page_size: int, device: torch.device, rows: int | None = None) -> TokenBatch:
    """Pack `plan` into a batch of tensors. `rows` pads a plan of decodes with rows that read and write only the null
    page.

    Args:
        plan: the spans to pack, decodes first.
        page_size: tokens per page.
        device: the device of the tensors.
        rows: number of rows after padding; None: no padding.
    """
    spans = plan.spans
    padding = rows - len(spans) if rows else 0
    ids, positions, starts, lengths, samples, limits = [], [], [0], [], [], []
    parents: list[int] = []
    trees = any(span.draft_parents for span in spans)
    for span in spans:
        ids += span.token_ids
        if trees:
            parents += (before := _parents_of(span))
            positions += [span.start + depth for depth in _depths(before)]
        else:
            positions += range(span.start, span.end)
        limits += [span.sequence.length_limit] * span.length
        starts.append(len(ids))
        lengths.append(span.end - span.sequence.num_evicted_tokens)
        samples += range(len(ids) - span.num_logits, len(ids))
    ids += [0] * padding
    positions += [0] * padding
    limits += [1] * padding
    starts += range(starts[-1] + 1, starts[-1] + 1 + padding)
    lengths += [1] * padding
    page_tables, slots = [], []
    for group in range(len(spans[0].sequence.pages)):
        if group in spans[0].sequence.states:
            read, written = _states_of(spans, group, page_size)
            page_tables.append(torch.tensor(read + [[NULL_PAGE]] * padding, dtype=torch.int32, device=device))
            slots.append(torch.tensor(written + [NULL_PAGE] * padding, device=device))
            continue
        held = [span.sequence.pages[group] for span in spans]
        widest = max(MIN_TABLE_WIDTH, *(len(pages) for pages in held))
        table = [pages + [NULL_PAGE] * (widest - len(pages)) for pages in held]
        table += [[NULL_PAGE] * widest] * padding
        # A delayed group (`KVCacheGroup.is_delayed`) may have no page yet for a span's last positions; it is not
        # written by slots.
        slots_here = [
            pages[place] * page_size + slot % page_size if (place := slot // page_size) < len(pages) else 0
            for span, pages in zip(spans, held, strict=True)
            for slot in range(
                span.start - span.sequence.num_evicted_tokens, span.end - span.sequence.num_evicted_tokens
            )
        ]
        page_tables.append(torch.tensor(table, dtype=torch.int32, device=device))
        slots.append(torch.tensor(slots_here + [0] * padding, device=device))
    return TokenBatch(
        token_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        span_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_tables=tuple(page_tables),
        slot_mapping=tuple(slots),
        logits_indices=torch.tensor(samples, dtype=torch.long, device=device),
        decode_only=plan.decode_only,
        length_limits=torch.tensor(limits, device=device),
        parents=torch.tensor(parents + [-1] * padding, device=device) if trees else None,
    )


def batch_tensors(batch: TokenBatch) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    for value in vars(batch).values():
        yield from (each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Tensor))


def map_fields(batch: Mapping[str, Any], kind: type, function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the fields of a batch with `function` applied to each value of the type `kind` (tensors or arrays)."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return function(value) if isinstance(value, kind) else value

    return {name: convert(value) for name, value in batch.items()}


def _parents_of(span: Span) -> list[int]:
    """Return the index in the span of each token's parent; -1 for the first token."""
    known = span.length - len(span.draft_token_ids)
    if not span.draft_parents:
        return list(range(-1, span.length - 1))
    return [*range(-1, known - 1), *(known + parent for parent in span.draft_parents)]


def _depths(parents: list[int]) -> list[int]:
    """Return each token's distance from the first."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def synchronized(logits: Tensor) -> Tensor:
    """Wait until `logits` are computed, and return them: so a step's measured time includes the device's work."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits


def _states_of(spans: tuple[Span, ...], group: int, page_size: int) -> tuple[list[list[int]], list[int]]:
    """Return the page with the state before each span, and for each token the page for the state after it."""
    read, written = [], []
    for span in spans:
        sequence, known = span.sequence, span.num_known_tokens
        read.append([state_page(sequence.pages[group], span.start, page_size)])
        pages = written_states(sequence.states[group], span.start, known, span.end, page_size)
        written += [pages.get(position + 1, NULL_PAGE) for position in range(span.start, span.end)]
    return read, written
