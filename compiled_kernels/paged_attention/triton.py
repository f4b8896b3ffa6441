"""Compute paged attention in Triton with a running softmax (FlashAttention, Dao et al., 2022); all query heads of a
key/value head are computed together.

If there are too few programs to fill the device, their loops over the context are split and the parts merged
(FlashDecoding, Dao et al., 2023). The host never waits for the device: programs read the lengths. Spans of one token
and longer spans have separate launches of different shapes, each of which skips the other's spans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.paged_attention.api import PagedKV
from compiled_kernels.triton_code.attention import attend
from compiled_kernels.triton_code.attention_launches import MIN_DOT_SIZE, AttentionLaunches, reach_of
from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, check, power_of_two, run

TILE_BYTES = 16 * 1024  # bytes of keys in a tile, and the same of values: 64 keys of dim 128 in bfloat16
MAX_TILE_KEYS = 64
UNLIMITED_WINDOW = 1 << 30  # a window that hides no key


def plan(
    q: Tensor,
    kv: PagedKV,
    spans: Spans,
    parameters: AttentionParameters,
    tile: int | None = None,
    splits: int | None = None,
    batch_invariant: bool = False,
) -> tuple[list[KernelLaunch], Tensor]:
    """Plan the launches of paged attention.

    Args:
        tile: keys of a tile; chosen by shape unless given.
        splits: parts of each loop over the context; chosen by shape unless given.
        batch_invariant: every query is computed in one order by one kernel, whatever its span and the batch
            composition: tiles at fixed positions, all masked, none split.

    Returns:
        The launches, and the output they fill.
    """
    rules = parameters.kernel_rules("paged_attention", Backend.TRITON)
    (keys, values, page_table), (groups, size), chosen = kv[:3], kv.keys.shape[1:3], kv.chosen
    check("paged_attention", q, keys, values, parameters.sink_logits)
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise BackendError("paged_attention: backend triton reads contiguous pages")
    held = page_table.shape[1] * size
    narrow = min(MAX_TILE_KEYS, TILE_BYTES // (power_of_two(q.shape[2], MIN_DOT_SIZE) * keys.dtype.itemsize))
    if batch_invariant:
        tile, splits = max(MIN_DOT_SIZE, narrow), 1
        rules = rules._replace(sliding_window=rules.sliding_window or UNLIMITED_WINDOW)
    tile = tile or max(MIN_DOT_SIZE, min(narrow, power_of_two(reach_of(held, *rules[:2]))))
    pages = page_table if chosen is None else chosen.to(torch.int8).contiguous()  # not read unless pages are selected
    walk = {
        "chosen_pages": pages, "chosen_stride": groups * page_table.shape[1], "held": page_table.shape[1],
        "CHOSEN": chosen is not None, "PAGES": power_of_two(ceil_div(tile, size) + 1),
        "keys": keys, "values": values, "page_table": page_table, "table_stride": page_table.stride(0),
        "groups": groups, "page_stride": keys.stride(0), "group_stride": keys.stride(1), "TILE": tile, "SIZE": size,
    }  # fmt: skip
    return AttentionLaunches(
        attend, q, spans, parameters, rules, groups, held, tile, walk, splits, batch_invariant
    ).plan()


def paged_attention(q: Tensor, kv: PagedKV, spans: Spans, parameters: AttentionParameters) -> Tensor:
    return run(*plan(q, kv, spans, parameters))
