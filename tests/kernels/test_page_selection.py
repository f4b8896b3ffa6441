"""The choice of pages: as for a text alone, however steps cut it. That no other page is read: `test_pages_read.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels.attention import Spans
from compiled_kernels.page_selection.api import select_pages, selected_alone, summarize_pages
from compiled_kernels.page_selection.selection import SUMMARIES, PageSelection, page_scores, page_selection
from compiled_kernels.scalar_code.trace import Untraceable
from tests.thorough import tries

GROUPS, SHARE, DIM = 2, 3, 8


def bounds(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(query * low, query * high)


def mean(query: Tensor, mean: Tensor) -> Tensor:
    return query * mean


TERMS: list[tuple[Callable[..., Tensor], tuple[str, ...]]] = [(bounds, ("min", "max")), (mean, ("mean",))]
selections = st.builds(
    lambda term, size, keep, first: page_selection(term[0], term[1], size, keep, first),
    st.sampled_from(TERMS), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2),
)  # fmt: skip


def in_pages(keys: Tensor, selection: PageSelection, seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return a pool with the keys [context, group, dim] in random pages, their table, and the summaries; all else is
    NaN."""
    size, (context, groups, dim) = selection.page_size, keys.shape
    count = -(-context // size)
    table = torch.randperm(count + 3, generator=torch.Generator().manual_seed(seed))[:count] + 1
    pool = torch.full((count + 5, groups, size, dim), torch.nan)
    slots = table[torch.arange(context) // size] * size + torch.arange(context) % size
    pool[slots // size, :, slots % size] = keys
    summaries = [torch.full((count + 5, groups, dim), torch.nan) for _ in selection.summaries]
    summarize_pages(summaries, pool, slots, selection.summaries)
    return pool, table, summaries


@settings(max_examples=tries(60))
@given(selections, st.integers(1, 40), st.integers(0, 2**31), st.data())
def test_a_choice_is_that_of_the_text_alone(
    selection: PageSelection, context: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(context, GROUPS, DIM, generator=generator)
    q = torch.randn(context, GROUPS * SHARE, DIM, generator=generator)
    _, table, summaries = in_pages(keys, selection, seed)
    held = len(table) + 2  # a table is wider than a sequence needs
    table = torch.nn.functional.pad(table, (0, 2))[None].int()
    span = data.draw(st.integers(1, context))
    whole = selected_alone(q, keys, selection)
    for spans in (
        Spans(torch.tensor([0, span]), torch.tensor([context])),
        *([Spans(torch.tensor([0, 1]), torch.tensor([context]), decode_only=True)] if span == 1 else []),
    ):
        found = select_pages(q[context - span :], summaries, table, spans, selection)
        assert found.shape == (span, GROUPS, held) and not found[:, :, whole.shape[2] :].any()
        assert torch.equal(found[:, :, : whole.shape[2]], whole[context - span :])


@settings(max_examples=tries(40))
@given(selections, st.integers(1, 40), st.integers(0, 2**31))
def test_a_query_reads_its_own_page_the_first_and_as_many_of_the_others_as_are_kept(
    selection: PageSelection, context: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(context, GROUPS, DIM, generator=generator).round()  # so that some scores are equal
    q = torch.randn(context, GROUPS * SHARE, DIM, generator=generator).round()
    chosen = selected_alone(q, keys, selection)
    for token in range(context):
        own = token // selection.page_size
        for group in range(GROUPS):
            found = chosen[token, group].nonzero().flatten().tolist()
            assert found == pages_read(q[token], keys[:, group], group, own, selection)
            assert len(found) == min(own, selection.first + selection.keep) + 1


def pages_read(q: Tensor, keys: Tensor, group: int, own: int, selection: PageSelection) -> list[int]:
    """Return the pages that a query [head, dim] reads of keys [context, dim], by the words of `PageSelection`."""
    size, pages = selection.page_size, range(own)
    others = [page for page in pages if page >= selection.first]

    def score(page: int) -> float:
        of_page = keys[page * size : (page + 1) * size]
        given_ = {kind: SUMMARIES[kind](of_page) for kind in selection.summaries}
        names = [name for name, _ in selection.term.inputs[1:]]
        summaries = dict(zip(names, given_.values(), strict=True))
        heads = q[group * SHARE : (group + 1) * SHARE]
        return max(float(selection.term(query=head, **summaries).sum()) for head in heads)

    best = sorted(others, key=score, reverse=True)[: selection.keep]  # the sort keeps the order of equal scores
    return sorted({*best, *pages[: selection.first], own})


@settings(max_examples=tries(30))
@given(st.integers(0, 2**31), st.integers(1, 6))
def test_bounds_of_keys_bound_every_score_of_a_page(seed: int, size: int) -> None:
    """Quest, section 3.2: no key of a page has a product with the query above the page's score."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(5, size, 1, DIM, generator=generator)
    q = torch.randn(4, SHARE, DIM, generator=generator)
    read = [SUMMARIES[kind](keys.transpose(1, 2))[None] for kind in ("min", "max")]
    scores = page_scores(q, read, page_selection(bounds, ("min", "max"), size, 1).term)
    products = torch.einsum("thd,pogd->tpho", q, keys).amax((2, 3))
    assert bool((products <= scores[:, 0] + 1e-5).all())


def test_what_cannot_be_traced_is_refused_with_its_line() -> None:
    def decides(query: Tensor, mean: Tensor) -> Any:
        return query if mean > 0 else mean

    with pytest.raises(Untraceable, match=r"test_page_selection.py:\d+ `return query if mean > 0"):
        page_selection(decides, ("mean",), 4, 1)
