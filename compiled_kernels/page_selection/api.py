"""Maintain the summaries of pages, and select pages for the queries of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compiled_kernels.attention import Spans
from compiled_kernels.page_selection.selection import SUMMARIES, PageSelection, choose, page_scores

QUERIES_TOGETHER = 64  # number of queries with scores in memory at once


def summarize_pages(
    summaries: Sequence[Float[Tensor, "page group dim"]],
    keys: Float[Tensor, "page group offset dim"],
    slots: Int[Tensor, " token"],
    kinds: Sequence[str],
) -> None:
    """Recompute, in place, the summaries of the pages that tokens were written to.

    The summary of a page that is not full is meaningless, and no query reads it.

    Args:
        summaries: one tensor for each of `kinds`.
        keys: the pages.
        slots: where the tokens were written; slot = page * (tokens per page) + offset.
        kinds: names in `SUMMARIES`.
    """
    pages = slots.long() // keys.shape[2]
    if not torch.compiler.is_compiling():
        pages = pages.unique()
    written = keys[pages].to(torch.promote_types(keys.dtype, torch.float32))
    for stored, kind in zip(summaries, kinds, strict=True):
        stored[pages] = SUMMARIES[kind](written).to(stored.dtype)


def select_pages(
    q: Float[Tensor, "token head dim"],
    summaries: Sequence[Float[Tensor, "page group dim"]],
    page_table: Int[Tensor, "seq held"],
    spans: Spans,
    selection: PageSelection,
) -> Bool[Tensor, "token group held"]:
    """Return a boolean for each query, key/value head and page of the query's sequence: whether the query reads the
    page.
    """
    groups, held = summaries[0].shape[1], page_table.shape[1]
    if spans.decode_only:
        own = (spans.context_lengths.long() - 1) // selection.page_size
        return _selected(q, [each[page_table.long()] for each in summaries], own, selection)
    shown = torch.zeros(len(q), groups, held, dtype=torch.bool, device=q.device)
    for seq, rows, context in spans.listed():
        pages = page_table[seq, : -(-context // selection.page_size)].long()
        read = [each[pages][None] for each in summaries]
        for start in range(rows.start, rows.stop, QUERIES_TOGETHER):
            some = slice(start, min(start + QUERIES_TOGETHER, rows.stop))
            own = torch.arange(some.start, some.stop, device=q.device) + (context - rows.stop)
            found = _selected(q[some], read, own // selection.page_size, selection)
            shown[some, :, : len(pages)] = found
    return shown


def selected_alone(q: Tensor, keys: Tensor, selection: PageSelection) -> Bool[Tensor, "token group page"]:
    """Return a boolean for each query, key/value head and page of a single text: whether the query reads the page. This
    plain implementation is the reference in tests of `select_pages`.

    Args:
        q: queries of the last tokens [token, head, dim].
        keys: keys of all tokens [context, group, dim].
        selection: the selection rule.
    """
    size, (context, groups, dim) = selection.page_size, keys.shape
    whole = context // size
    pages = keys[: whole * size].view(whole, size, groups, dim).transpose(1, 2)
    exact = pages.to(torch.promote_types(keys.dtype, torch.float32))
    read = [SUMMARIES[kind](exact).to(keys.dtype)[None] for kind in selection.summaries]
    own = torch.arange(context - len(q), context, device=q.device) // size
    read = [torch.nn.functional.pad(each, (0, 0, 0, 0, 0, -(-context // size) - whole)) for each in read]
    return choose(page_scores(q, read, selection.term), own, selection)


def _selected(q: Tensor, read: Sequence[Tensor], own: Tensor, selection: PageSelection) -> Tensor:
    return choose(page_scores(q, read, selection.term), own, selection)
