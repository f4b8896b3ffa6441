"""Pages of a store have the bytes of a formula, and are resident once they are written."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.store import KVStore
from workbench.machine.processor import resident_bytes

SHAPES = st.lists(
    st.builds(KVCacheSpec, num_kv_heads=st.integers(1, 4), head_dim=st.integers(1, 16), group=st.integers(0, 1)),
    min_size=1,
    max_size=4,
)


@given(SHAPES, st.integers(1, 5), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_bytes_equal_the_formula(shapes: list[KVCacheSpec], pages: int, size: int, dtype: torch.dtype) -> None:
    store = KVStore(shapes, (pages, 2 * pages), size, dtype)
    assert store.bytes == store.expected_bytes
    by_hand = sum(2 * s.num_kv_heads * s.head_dim * dtype.itemsize for s in shapes)
    assert store.bytes_per_token == by_hand
    assert sum(store.page_bytes(table) for table in range(2)) == by_hand * size


def test_pages_are_zeros_and_resident_once_they_are_written() -> None:
    before = resident_bytes()
    store = KVStore([KVCacheSpec(8, 64)], (8191,), 16, torch.float32)
    pages, _ = store.page_tensors(0)
    assert not pages[::512].any() and resident_bytes() - before < store.bytes / 16
    pages.fill_(1)
    assert resident_bytes() - before > store.bytes / 3
