"""Flash attention over pages (Dao et al., 2022; split over the context: Dao et al., 2023), grouped heads together.

Where programs are too few to fill the device, their walks over the context are split and merged. Nothing here waits
for the device: lengths are read by the programs, and spans of one token and longer ones have launches of their own
shape, each of which leaves the other's spans alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_kernels.lanes import LaneError
from compiled_kernels.triton_code.attention import ANY, LONGER, SINGLE, attend, merge
from compiled_kernels.triton_code.launch import Launch, blocks, check, power_below, power_of_two, processors, run

LEAST_DOT = 16  # the tensor cores' smallest tile
TILE_BYTES = 16 * 1024  # of keys, and as much of values: 64 keys of dim 128 in bfloat16
MOST_KEYS = 64
MOST_ROWS = 128  # two warp groups of 64 rows, the widest of Hopper's matrix instruction
MOST_ACCUMULATED = 128 * 128  # rows times dim in registers
EXACT_ROWS = 16  # of float32, which has no tensor cores here: its operands lie in registers too
# Half the stages of the pipeline go to the pages' numbers, which are read before the keys: two tiles are under way.
STAGES = 5
AT_ONCE = 3  # programs of a decode that a processor holds: 70 KiB of shared memory each
LEAST_TILES = 2  # a part of a split walk, so that what it leaves is small beside what it reads
MOST_SPLITS = 64
GOOD_ENOUGH = 0.85  # of the best share of places taken


def splits_for(programs: int, processors: int, most: int, decode: bool) -> int:
    """Parts of each walk, a power of two. Decode waits for memory: the fewest parts that keep every place of the
    device taken nearly as well as any number would. A long span is arithmetic: parts only for idle processors."""
    if not decode:
        return min(most, power_below(processors // max(1, programs)))
    choices = [1 << bits for bits in range(most.bit_length())]
    waves = [max(1, programs) * parts / (AT_ONCE * processors) for parts in choices]
    taken = [wave / math.ceil(wave) for wave in waves]
    return next(parts for parts, share in zip(choices, taken, strict=True) if share >= GOOD_ENOUGH * max(taken))


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
) -> tuple[list[Launch], Tensor]:
    """`tile` (keys) and `splits` are chosen by shape where they are not given."""
    check("paged_attention", q, keys, values, sink_logits)
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise LaneError("paged_attention: lane triton reads contiguous pages")
    tokens, heads, dim = q.shape
    groups, size = keys.shape[1:3]
    seqs, held = page_table.shape
    share, padded = heads // groups, power_of_two(dim, LEAST_DOT)
    narrow = TILE_BYTES // (padded * keys.dtype.itemsize)
    reach = min(held * size, window + sinks) if window else held * size
    tile = tile or max(LEAST_DOT, min(MOST_KEYS, narrow, power_of_two(reach)))
    # Rows outside every span give zeros; where every row is a span of its own there are none.
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if decode_only else q.new_zeros(q.shape)
    common = {
        "span_starts": span_starts, "sink_logits": q if sink_logits is None else sink_logits, "out": out,
        "seqs": seqs, "heads": heads, "dim": dim, "DIM": padded, "WHOLE_DIM": padded == dim,
    }  # fmt: skip
    walk = common | {
        "q": q, "keys": keys, "values": values, "page_table": page_table, "context_lengths": context_lengths,
        "table_stride": page_table.stride(0), "groups": groups, "q_token": q.stride(0), "q_head": q.stride(1),
        "q_dim": q.stride(2), "page_stride": keys.stride(0), "group_stride": keys.stride(1),
        "scale": scale, "softcap": softcap, "window": window, "sinks": sinks,
        "SHARE": share, "TILE": tile, "SIZE": size, "WINDOW": window > 0, "SOFTCAP": softcap > 0,
    }  # fmt: skip

    def launches(kind: int, rows: int, alone: bool) -> list[Launch]:
        """The walk over spans of one kind, and the merge where it is split; `alone` if there is no other kind."""
        together = 1 if kind == SINGLE.value else rows // share
        count = seqs if kind == SINGLE.value else tokens // together + seqs
        most = min(MOST_SPLITS, power_below(blocks(reach, tile) // LEAST_TILES))
        parts = splits or splits_for(count * groups, processors(q.device), most, decode=kind == SINGLE.value)
        buffers = {"parts": out, "logs": out}  # unused where nothing is split
        if parts > 1:
            buffers = {
                "parts": q.new_empty((tokens, heads, parts, dim), dtype=torch.float32),
                "logs": q.new_empty((tokens, heads, parts), dtype=torch.float32),
            }
        sink = sink_logits is not None
        walked = walk | buffers | {
            "splits": parts, "TOKENS": together, "ROWS": rows, "KIND": kind, "SPLIT": parts > 1,
            "SINK_LOGITS": sink and parts == 1,
        }  # fmt: skip
        warps = 8 if rows == MOST_ROWS else 4
        found = [Launch(attend, (count, groups, parts), walked, num_warps=warps, num_stages=STAGES)]
        if parts > 1:
            merged = common | buffers | {
                "splits": parts, "SPLITS": power_of_two(parts), "KIND": ANY.value if alone else kind,
                "SINK_LOGITS": sink,
            }  # fmt: skip
            found.append(Launch(merge, (tokens, heads), merged))
        return found

    single_rows = power_of_two(share, LEAST_DOT)
    if decode_only:
        return launches(SINGLE.value, single_rows, alone=True), out
    most = min(MOST_ROWS, MOST_ACCUMULATED // padded) if q.dtype.itemsize == 2 else EXACT_ROWS
    longer_rows = max(single_rows, min(most, power_of_two(blocks(tokens, seqs) * share)))
    if seqs == 1:  # one span, and it is not of one token
        return launches(ANY.value, longer_rows, alone=True), out
    return [
        *launches(SINGLE.value, single_rows, alone=False),
        *launches(LONGER.value, longer_rows, alone=False),
    ], out


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
        raise LaneError("paged_attention: lane triton knows no score functions, not ALiBi")
    return run(
        *plan(
            q, keys, values, page_table, span_starts, context_lengths, scale, window, sinks, decode_only, softcap,
            sink_logits,
        )
    )  # fmt: skip
