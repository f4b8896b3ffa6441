"""Sequences in a fixed pool: what the sizes promise is what the scheduler can run at once, and not one more."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.pages import KVCacheGroup
from workbench.memory.capacity import (
    lasting_bytes_per_token,
    max_concurrent_sequences,
    page_bytes,
    split_budget_into_pages,
)

SIZES = st.integers(1, 5)


@settings(max_examples=tries(100))
@given(st.integers(1, 60), st.integers(1, 24), st.integers(1, 8), st.integers(1, 6))
def test_a_full_layer_holds_what_its_pages_hold(tokens: int, chunk: int, page: int, fit: int) -> None:
    tables = (KVCacheGroup((0,)),)
    one = -(-tokens // page)
    pages, promised = split_budget_into_pages(tables, (10,), 10 * (one * fit + 1) + 9, tokens, chunk, page)
    assert (promised, pages) == (fit, (fit * one,))
    assert max_concurrent_sequences(tables, pages, page, tokens, chunk, fit) == fit


@settings(max_examples=tries(25))
@given(
    st.integers(1, 60), st.integers(1, 24), st.integers(1, 8), st.integers(1, 6),
    st.integers(2, 30), st.booleans(),
)  # fmt: skip
def test_with_a_budget_as_many_as_its_pages_hold(
    tokens: int, chunk: int, page: int, fit: int, most: int, in_decode: bool
) -> None:
    """The predicted number of requests runs, as if texts were no longer than their budget."""
    tables, budget = (KVCacheGroup((0,)),), EvictionBudget(most, in_decode=in_decode)
    longest = most if in_decode else most + 2 * page  # the last two pages of a text are decoded
    once, one = (-(-held // page) for held in (tokens, min(tokens, longest)))
    pages, promised = split_budget_into_pages(tables, (10,), 10 * (1 + once + one * fit), tokens, chunk, page, budget)
    assert promised >= fit
    assert max_concurrent_sequences(tables, pages, page, tokens, chunk, promised, budget) >= promised
    if in_decode:
        assert pages == (-(-min(tokens, most) // page) * promised,)


@settings(max_examples=tries(200))
@given(
    st.integers(1, 80), st.integers(1, 24), st.integers(1, 8), st.integers(1, 5), st.integers(1, 30), st.integers(1, 6)
)
def test_windowed_and_late_tables_together(tokens: int, chunk: int, page: int, fit: int, back: int, lag: int) -> None:
    """The number predicted within a budget runs, while others are prefilled."""
    late = KVCacheGroup((2,), residual_length=lag, quant_group=page), KVCacheGroup((2,), sliding_window=lag + page)
    tables = (KVCacheGroup((0,)), KVCacheGroup((1,), sliding_window=back, num_sink_tokens=2), *late)
    sizes = (10, 7, 3, 5)
    budget = fit * 400
    try:
        pages, promised = split_budget_into_pages(tables, sizes, budget, tokens, chunk, page)
    except WorkbenchError:
        return
    assert sum(size * (count + 1) for size, count in zip(sizes, pages, strict=True)) <= budget + sum(sizes)
    assert max_concurrent_sequences(tables, pages, page, tokens, chunk, promised) >= promised


def test_a_scheduler_that_is_short_says_so() -> None:
    assert max_concurrent_sequences((KVCacheGroup((0,)),), (7,), 4, 16, 8, 3) == 1
    assert max_concurrent_sequences((KVCacheGroup((0,)),), (3,), 4, 16, 8, 3) == 0


class Store:
    """A cache of two tables: quantized pages, and recent ones of the same layer."""

    def __init__(self, torch) -> None:
        self.page_size = 4
        self.groups = (KVCacheGroup((0, 1), residual_length=4, quant_group=4), KVCacheGroup((0, 1), sliding_window=8))
        self._tensors = ([torch.zeros(3, 4, 5, dtype=torch.uint8)] * 2, [torch.zeros(2, 4, 5)])

    def page_tensors(self, group: int):
        return self._tensors[group]


def test_bytes_are_counted_from_the_tensors() -> None:
    import torch

    store = Store(torch)
    assert page_bytes(store) == (2 * 20, 80)  # type: ignore[arg-type]
    assert lasting_bytes_per_token(store) == 10.0  # type: ignore[arg-type]
