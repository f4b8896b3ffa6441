"""The store's bytes are the formula's, and scrubbing leaves nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.store import DenseLayer, KVStore

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


def test_scrub_cleans_one_layer_group_only() -> None:
    store = KVStore([KVCacheSpec(1, 2, 0), KVCacheSpec(1, 2, 1)], (3, 3), 4, torch.float32)
    first, second = store.layers
    assert isinstance(first, DenseLayer) and isinstance(second, DenseLayer)
    for pages in (first.keys, first.values, second.keys, second.values):
        pages.fill_(torch.nan)
    store.zero_pages(0, [2])
    assert torch.equal(first.keys[2], torch.zeros(1, 4, 2)) and torch.equal(first.values[2], torch.zeros(1, 4, 2))
    assert first.keys[1].isnan().all() and second.keys[2].isnan().all()
