"""Sequences in a fixed pool: what the sizes promise is what the scheduler can run at once, and not one more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.cache.tables import Table
from workbench.errors import WorkbenchError
from workbench.study.capacity import page_bytes, pages_within, sequences_at_once, stored_bytes_per_token

SIZES = st.integers(1, 5)


@settings(max_examples=100)
@given(st.integers(1, 60), st.integers(1, 24), st.integers(1, 8), st.integers(1, 6))
def test_a_full_layer_holds_what_its_pages_hold(tokens: int, chunk: int, page: int, fit: int) -> None:
    tables = (Table((0,)),)
    one = -(-tokens // page)
    pages, promised = pages_within(tables, (10,), 10 * (one * fit + 1) + 9, tokens, chunk, page)
    assert (promised, pages) == (fit, (fit * one,))
    assert sequences_at_once(tables, pages, page, tokens, chunk, fit + 1) == fit


def test_a_pool_too_small_is_told() -> None:
    with pytest.raises(WorkbenchError, match="holds no sequence of 64 tokens: one takes 40"):
        pages_within((Table((0,)),), (10,), 49, 64, 16, 16)
