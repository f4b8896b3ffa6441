"""Flash attention over pages (Dao et al., 2022; split over the context: Dao et al., 2023), grouped heads together.

Where programs are too few to fill the device, their walks over the context are split and merged. Nothing here waits
for the device: lengths are read by the programs, and spans of one token and longer ones have launches of their own
shape, each of which leaves the other's spans alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.triton_code.attention import attend
from compiled_kernels.triton_code.attention_launches import MIN_DOT_SIZE, AttentionLaunches
from compiled_kernels.triton_code.launch import KernelLaunch, check, power_of_two, run

TILE_BYTES = 16 * 1024  # of keys, and as much of values: 64 keys of dim 128 in bfloat16
MAX_TILE_KEYS = 64
UNLIMITED_WINDOW = 1 << 30  # a window that hides nothing


def plan(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int,
    sinks: int,
    decode_only: bool,
    softcap: float,
    sink_logits: Tensor | None,
    tile: int | None = None,
    splits: int | None = None,
    batch_invariant: bool = False,
) -> tuple[list[KernelLaunch], Tensor]:
    """Plan the launches of paged attention.

    Args:
        tile: keys of a tile; chosen by shape unless given.
        splits: parts of each walk over the context; chosen by shape unless given.
        batch_invariant: every query walks its own context in one order, by one kernel, whatever its span and the batch
            composition: tiles at positions of their own, all of them masked, none in parts.

    Returns:
        The launches, and the output they fill.
    """
    check("paged_attention", q, keys, values, sink_logits)
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise BackendError("paged_attention: backend triton reads contiguous pages")
    tokens, heads, dim = q.shape
    groups, size = keys.shape[1:3]
    seqs, held = page_table.shape
    share, padded = heads // groups, power_of_two(dim, MIN_DOT_SIZE)
    narrow = TILE_BYTES // (padded * keys.dtype.itemsize)
    reach = min(held * size, window + sinks) if window else held * size
    if batch_invariant:
        tile, splits, window = max(MIN_DOT_SIZE, min(MAX_TILE_KEYS, narrow)), 1, window or UNLIMITED_WINDOW
    tile = tile or max(MIN_DOT_SIZE, min(MAX_TILE_KEYS, narrow, power_of_two(reach)))
    # Rows outside every span give zeros; where every span has one row there are none.
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if decode_only else q.new_zeros(q.shape)
    spans = {
        "span_starts": span_starts, "sink_logits": q if sink_logits is None else sink_logits, "out": out,
        "seqs": seqs, "heads": heads, "dim": dim, "DIM": padded, "WHOLE_DIM": padded == dim,
    }  # fmt: skip
    walk = {
        "q": q, "keys": keys, "values": values, "page_table": page_table, "context_lengths": context_lengths,
        "table_stride": page_table.stride(0), "groups": groups, "q_token": q.stride(0), "q_head": q.stride(1),
        "q_dim": q.stride(2), "page_stride": keys.stride(0), "group_stride": keys.stride(1),
        "scale": scale, "softcap": softcap, "window": window, "sinks": sinks,
        "SHARE": share, "TILE": tile, "SIZE": size, "WINDOW": window > 0, "SOFTCAP": softcap > 0,
    }  # fmt: skip

    walks = AttentionLaunches(
        attend, spans, walk, q, groups, reach, tile, sink_logits is not None, splits, batch_invariant
    )
    return walks.launches(decode_only), out


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int,
    sinks: int,
    decode_only: bool,
    softcap: float,
    sink_logits: Tensor | None,
    alibi: bool,
) -> Tensor:
    if alibi:
        raise BackendError("paged_attention: backend triton knows no score functions, not ALiBi")
    return run(
        *plan(
            q, keys, values, page_table, span_starts, context_lengths, scale, window, sinks, decode_only, softcap,
            sink_logits,
        )
    )  # fmt: skip
