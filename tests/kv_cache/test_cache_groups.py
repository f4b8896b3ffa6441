"""The rules of tables against what queries read, position by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.kv_cache.format import KVCacheSpec, LayerFormat
from workbench.kv_cache.pages import KVCacheGroup, build_cache_groups, pages_for


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KVCacheGroup, int]:
    """A table and a page size that is a multiple of its group."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    late = draw(st.booleans())
    back, first = draw(st.sampled_from([None, 1, 2, 5, 8, 13])), draw(st.sampled_from([0, 0, 1, 5]))
    group = draw(st.sampled_from([g for g in (1, 2, 4, 8) if size % g == 0])) if late else 1
    strides = [1] if late or back is None else [s for s in (1, 2, 4, 8) if s <= back]  # of a page, or of several
    return KVCacheGroup(
        (), back, first, draw(st.integers(0, 8)) if late else 0, group, draw(st.sampled_from(strides))
    ), size


def reads(table: KVCacheGroup, query: int) -> set[int]:
    """The rule as it is written."""
    settled = max(0, (query + 1 - table.residual_length) // table.quant_group * table.quant_group)
    gone = (
        0
        if table.sliding_window is None
        else max(0, query - table.sliding_window + table.stride) // table.stride * table.stride
    )
    return {p for p in range(settled) if p >= gone or p < table.num_sink_tokens}


steps = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda step: (step[0], sum(step)))


@given(layouts(), steps)
def test_a_step_holds_what_it_reads_and_writes(layout: tuple[KVCacheGroup, int], step: tuple[int, int]) -> None:
    (table, size), (start, end) = layout, step
    first, rest = table.pages_needed(start, end, size)
    held = {*first, *rest}
    assert {p // size for query in range(start, end) for p in reads(table, query)} <= held
    assert {p // size for p in range(table.quantized_until(start), table.quantized_until(end))} <= held
    assert len(held) == len(first) + len(rest)


@given(layouts(), st.integers(0, 40), st.integers(0, 60))
def test_pages_out_of_the_window_are_never_read_later(
    layout: tuple[KVCacheGroup, int], computed: int, later: int
) -> None:
    table, size = layout
    dead = set(table.out_of_window_pages(computed, size))
    assert not dead & {p // size for p in reads(table, computed + later)}
    assert dead <= set(range(table.quantized_until(computed) // size)), "only full pages are given back"
    if table.sliding_window is not None and not table.is_delayed:  # and none is kept too long
        alive = {p // size for p in reads(table, computed) if p < computed} | set(
            range(pages_for(table.num_sink_tokens, size))
        )
        assert set(range(computed // size)) - alive <= dead


@given(layouts(), st.integers(0, 60), st.integers(1, 12))
def test_the_most_at_once(layout: tuple[KVCacheGroup, int], tokens: int, chunk: int) -> None:
    """Over all ways to cut a text into steps; exact for tables that are not late and of whole strides a page."""
    table, size = layout
    most = 0
    for start in range(tokens):
        for end in range(start + 1, min(start + chunk, tokens) + 1):
            first, rest = table.pages_needed(start, tokens if table.sliding_window is None else end, size)
            most = max(most, len(first) + len(rest))
    bound = table.max_pages(tokens, chunk, size)
    assert most == bound or ((table.is_delayed or size % table.stride) and most < bound)


@given(layouts(), st.integers(0, 60))
def test_nothing_changes_before_it_is_said_to(layout: tuple[KVCacheGroup, int], computed: int) -> None:
    table, size = layout
    change = table.next_page_boundary(computed, size)
    assert change > computed
    for tokens in range(computed, change):
        assert table.out_of_window_pages(tokens, size) == table.out_of_window_pages(computed, size)
        assert table.quantized_until(tokens) // size == table.quantized_until(computed) // size


def test_tables_of_dense_layers() -> None:
    made = build_cache_groups(
        [{0: KVCacheGroup()}, {1: KVCacheGroup(sliding_window=8, num_sink_tokens=2)}, {0: KVCacheGroup()}]
    )
    assert made == (KVCacheGroup((0, 2)), KVCacheGroup((1,), sliding_window=8, num_sink_tokens=2))
    with pytest.raises(ValueError, match="layers of cache group 0 differ"):
        build_cache_groups([{0: KVCacheGroup()}, {0: KVCacheGroup(sliding_window=8)}])
    with pytest.raises(ValueError, match="at least 1"):
        KVCacheGroup(sliding_window=0)


@given(st.sampled_from([8, 16]), st.integers(1, 40), st.sampled_from([0, 3]), st.integers(0, 120), st.integers(1, 40))
def test_the_residual_of_a_quantized_layer(group: int, lag: int, sinks: int, start: int, length: int) -> None:
    """A step's queries read from it what they do not read quantized, and the step quantizes groups from it; the oldest
    page that it keeps is read by one or the other."""
    format = LayerFormat(format="int8", quant_group=group, residual_length=lag, num_sink_tokens=sinks)
    shape = KVCacheSpec(1, 8, 0, None, 0, format, 1)
    quantized, residual, rule, size = shape.cache_groups[0], shape.cache_groups[1], shape.quantization_rule, 16
    end = start + length
    queries, keys = torch.arange(start, end)[:, None], torch.arange(end)[None]
    wanted = ((keys <= queries) & ~rule.is_quantized(queries, keys)).any(0).nonzero()[:, 0].tolist()
    wanted += range(quantized.quantized_until(start), quantized.quantized_until(end))
    first, rest = residual.pages_needed(start, end, size)
    assert {p // size for p in wanted} <= {*first, *rest}
    assert not rest or min(rest) == pages_for(sinks, size) or min(rest) in {p // size for p in wanted}
    assert quantized.quantized_until(start) == residual.first_visible(start), (
        "a page goes as soon as its last group is quantized"
    )


@given(st.sampled_from([8, 16, 64]), st.integers(1, 200), st.integers(1, 600), st.integers(1, 2000))
def test_the_bound_of_a_residual(group: int, lag: int, chunk: int, tokens: int) -> None:
    """However long the prompt: the pages of the residual and a chunk, and one more, for they may begin in its middle.
    The incomplete group takes none of its own, since groups begin where pages do."""
    size, residual = 64, KVCacheGroup(sliding_window=lag + group, stride=group)
    bound = pages_for(lag + chunk - 1, size) + 1
    assert residual.max_pages(tokens, chunk, size) <= bound == residual.max_pages(10**6, chunk, size)
