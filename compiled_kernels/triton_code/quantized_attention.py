"""Compute paged attention with mostly quantized keys and values in Triton: loop over the tiles of three runs of
positions.

    positions   0 .. FIRST | FIRST ..... quantized_until | quantized_until .. last
    read from     residual       quantized                  residual

A query's own position determines which positions it reads quantized (see `QuantizationRule`), so the queries of one
program may differ near the border of two runs: tiles there are read in both forms, and each row uses the form that is
its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_kernels.triton_code.attention import span_at, store_result, update_softmax
from compiled_kernels.triton_code.quantized import DENSE, key_tile, value_tile


@triton.jit
def quantized_until(tokens, LAG: tl.constexpr, RUN: tl.constexpr):
    """Return how many of the first `tokens` tokens of a sequence are quantized."""
    return tl.maximum(tokens - LAG, 0) // RUN * RUN


@triton.jit(do_not_specialize=["seqs", "quantized_stride", "recent_stride", "splits", "window", "sinks"])
def attend_quantized(
    q, key_codes, key_scales, key_minima, value_codes, value_scales, value_minima, residual_keys, residual_values,
    quantized_table, residual_table, span_starts, context_lengths, sink_logits, out, parts, logs,
    seqs, quantized_stride, recent_stride, heads, dim, splits, q_token, q_head, q_dim,
    key_page, key_group, key_scale_page, key_scale_group,
    value_page, value_group, value_scale_page, value_scale_group, recent_page, recent_group,
    scale, softcap, window, sinks,
    SHARE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
    SIZE: tl.constexpr, DIM: tl.constexpr, WHOLE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    RUN: tl.constexpr, COLUMNS: tl.constexpr, LAG: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINK_LOGITS: tl.constexpr,
    MASK: tl.constexpr, REACH: tl.constexpr, SCORE: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    split = tl.program_id(2)
    mine = span_at(span_starts, seqs, tl.program_id(0), TOKENS, KIND)
    seq, start, span, within, alive = mine
    if not alive:
        return

    context = tl.load(context_lengths + seq)
    row = tl.arange(0, ROWS)
    token = within + row // SHARE
    head = group * SHARE + row % SHARE
    used = (row < TOKENS * SHARE) & (token < span)
    positions = context - span + token
    first = context - span + within
    last = tl.minimum(first + TOKENS, context) - 1
    line = (start + token).to(tl.int64)
    column = tl.arange(0, DIM)
    q_at = (line * q_token + head * q_head)[:, None] + (column * q_dim)[None, :]
    queries = tl.load(q + q_at, mask=used[:, None] & (column < dim)[None, :], other=0.0)

    # Tiles in the order of the walk: `front` residual ones, `quantized` ones from `begin` on, and residual ones last.
    settled = quantized_until(positions + 1, LAG, RUN)
    settled_last = quantized_until(last + 1, LAG, RUN)
    left = 0  # ends before the positions that any query of this program sees
    if WINDOW:
        left = tl.maximum(first - window + 1, 0)
    front = tl.minimum((FIRST + STEP - 1) // STEP, last // STEP + 1)
    begin = tl.maximum(left, FIRST) // STEP
    quantized = tl.maximum((settled_last + STEP - 1) // STEP - begin, 0)
    tail = tl.maximum(front, tl.maximum(quantized_until(first + 1, LAG, RUN), left) // STEP)
    steps = front + quantized + last // STEP + 1 - tail
    each = (steps + splits - 1) // splits
    step = split * each
    stop = tl.minimum(step + each, steps)

    sums = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    offset = tl.arange(0, TILE)  # a tile is STEP positions, padded if pages are smaller than a product's minimum tile
    for i in range(tl.maximum(step, front), tl.minimum(stop, front + quantized)):
        at = (i - front + begin) * STEP
        key = at + offset
        wanted = (offset < STEP) & (key >= FIRST) & (key >= left) & (key < settled_last)
        needed = True
        if REACH is not None:
            needed = REACH(first, last, at, at + STEP - 1, group * SHARE, group * SHARE + SHARE - 1)
        if needed:
            page = tl.load(quantized_table + seq.to(tl.int64) * quantized_stride + at // SIZE).to(tl.int64)
            k = key_tile(
                key_codes, key_scales, key_minima, page, group, at % SIZE, wanted, key_page, key_group,
                key_scale_page, key_scale_group, dim, TILE, SIZE, DIM, KEYS, RUN,
            )  # fmt: skip
            v = value_tile(
                value_codes, value_scales, value_minima, page, group, at % SIZE, wanted, value_page, value_group,
                value_scale_page, value_scale_group, dim, TILE, SIZE, DIM, VALUES, COLUMNS,
            )  # fmt: skip
            allowed = wanted[None, :] & (key[None, :] < settled[:, None])
            if WINDOW:
                allowed = allowed & (key[None, :] > positions[:, None] - window)
            sums, peak, total = update_softmax(
                sums, peak, total, queries, k, v, allowed, scale, softcap, head, positions, key, q.dtype.element_ty,
                SOFTCAP, MASK, SCORE,
            )  # fmt: skip
    early = tl.maximum(tl.minimum(stop, front) - step, 0)
    late = tl.maximum(step, front + quantized)
    for i in range(0, early + tl.maximum(stop - late, 0)):
        tile = tl.where(i < early, step + i, late - front - quantized + tail + i - early)
        key = tile * STEP + offset
        needed = True
        if REACH is not None:
            end = tile * STEP + STEP - 1
            needed = REACH(first, last, tile * STEP, end, group * SHARE, group * SHARE + SHARE - 1)
        if needed:
            page = tl.load(residual_table + seq.to(tl.int64) * recent_stride + tile * STEP // SIZE).to(tl.int64)
            allowed = (key[None, :] >= settled[:, None]) | (key < FIRST)[None, :]
            allowed = allowed & (offset < STEP)[None, :] & (key[None, :] <= positions[:, None])
            if WINDOW:
                allowed = allowed & ((key[None, :] > positions[:, None] - window) | (key < sinks)[None, :])
            wanted = tl.max((allowed & used[:, None]).to(tl.int32), axis=0) > 0
            k = key_tile(
                residual_keys, residual_keys, residual_keys, page, group, tile * STEP % SIZE, wanted, recent_page,
                recent_group, 0, 0, dim, TILE, SIZE, DIM, DENSE, RUN,
            )  # fmt: skip
            v = value_tile(
                residual_values, residual_values, residual_values, page, group, tile * STEP % SIZE, wanted, recent_page,
                recent_group, 0, 0, dim, TILE, SIZE, DIM, DENSE, COLUMNS,
            )  # fmt: skip
            sums, peak, total = update_softmax(
                sums, peak, total, queries, k, v, allowed, scale, softcap, head, positions, key, q.dtype.element_ty,
                SOFTCAP, MASK, SCORE,
            )  # fmt: skip

    store_result(
        out, parts, logs, sink_logits, sums, peak, total, line * heads + head, used, head, split, splits, dim,
        DIM, SPLIT, SINK_LOGITS, NORMALIZED,
    )  # fmt: skip
