"""The choice of pages: as for a text alone, however steps cut it; and pages that no query chose are never read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from compiled_kernels.agreement import disagreement
from compiled_kernels.attention import Spans
from compiled_kernels.cases import Case, CaseCost, suite_of
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


@settings(max_examples=tries(60), deadline=None)
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


@settings(max_examples=tries(40), deadline=None)
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


@settings(max_examples=tries(30), deadline=None)
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


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR, Backend.MLIR])
@pytest.mark.parametrize("spans", [(1, 1, 1), (1, 1, 40), (3, 1, 1), (40,)])
def test_pages_that_no_query_chose_are_not_read(spans: tuple[int, ...], backend: Backend) -> None:
    """They hold NaN: reading one shows."""
    if reason := backend_problems()[backend]:
        pytest.skip(reason)
    assert problem_of_unread_pages(backend, spans) is None


def problem_of_unread_pages(backend: Backend, spans: tuple[int, ...]) -> str | None:
    """Return how a backend's result differs from the specification's; None where it agrees."""
    suite, size = suite_of("paged_attention"), 64
    contexts = (447, 330, 204)[: len(spans)]
    arguments = {
        "contexts": contexts, "spans": spans, "num_kv_heads": 2, "queries_per_kv": 3, "dim": 16, "size": size,
        "dtype": torch.float32, "selected": 0.0,
    }  # fmt: skip
    q, kv, step, parameters = suite.input_maker(torch.Generator().manual_seed(1), **arguments)
    kv.chosen[:, :, 1] = True  # the same for all queries, beside their own
    kv.chosen[:, 0, 2] = True  # for one key/value head alone
    for seq, (context, span) in enumerate(zip(contexts, spans, strict=True)):
        rows = slice(int(step.starts[seq]), int(step.starts[seq + 1]))
        pages = range(-(-context // size))
        own = {(context - span + at) // size for at in range(span)}
        kv.chosen[rows, :, max(pages) + 1 :] = False
        for page in pages:
            if not bool(kv.chosen[rows, :, page].any()):
                assert page not in own
                kv.keys[int(kv.page_table[seq, page])] = torch.nan
                kv.values[int(kv.page_table[seq, page])] = torch.nan
    return disagreement(suite, Case("unread pages", arguments, CaseCost(0, 0)), (q, kv, step, parameters), backend)
