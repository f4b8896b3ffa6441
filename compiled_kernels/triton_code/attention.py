"""Triton kernels of paged attention: `attend` loops over tiles of keys, and `merge` combines the parts of loops that
were split.

A program processes all query heads of one key/value head (a group) for a few tokens of one span, as the rows of one
matrix, so that a key is read once for all of them:

    row r  =  token r // share, head r % share of its group          rows [0, TOKENS * share) of ROWS are used

It loops over the tiles of keys that its queries may see: the first `sinks` positions, then from the window's left edge
to its last query. `MASK` and `SCORE` are a user's functions (see `scalar_code`), and `REACH` returns whether the mask
may show any key of a tile to any query: other tiles are not read. With `CHOSEN`, the selected pages of each query,
tiles that no row of the program selected are not read. If the loop is split, each part writes its normalised result and
the logarithm of its sum, and `merge` combines them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_kernels.triton_code.dots import dot, operand

LOG2E = tl.constexpr(1.4426950408889634)
ANY, SINGLE, LONGER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # which spans a launch takes


@triton.jit
def span_of(span_starts, seqs, block, TOKENS: tl.constexpr):
    """Return the sequence of a block of tokens; sequence s has the blocks from starts[s] // TOKENS + s on, which are as
    many as its tokens need or one more. With TOKENS 0, return the sequence of token number `block`."""
    low = 0
    high = seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        begin = tl.load(span_starts + middle)
        if TOKENS > 0:
            begin = begin // TOKENS + middle
        if begin <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def span_at(span_starts, seqs, block, TOKENS: tl.constexpr, KIND: tl.constexpr):
    """Return the sequence of a block of tokens, the start and length of its span, the block's first token within the
    span, and whether this launch computes the span."""
    if KIND == SINGLE:
        seq = block
        within = 0
    else:
        seq = span_of(span_starts, seqs, block, TOKENS)
        within = (block - (tl.load(span_starts + seq) // TOKENS + seq)) * TOKENS
    start = tl.load(span_starts + seq)
    span = tl.load(span_starts + seq + 1) - start
    alive = within < span
    if KIND == SINGLE:
        alive = alive & (span == 1)
    if KIND == LONGER:
        alive = alive & (span != 1)
    return seq, start, span, within, alive


@triton.jit
def store_result(
    out, parts, logs, sink_logits, sums, peak, total, place, used, head, split, splits, dim,
    DIM: tl.constexpr, SPLIT: tl.constexpr, SINK_LOGITS: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Store the result of a program at `place` (token times heads plus head): the weighted values of its rows, or a
    part of them if loops are split. `NORMALIZED`: they are divided by the sum of their weights."""
    column = tl.arange(0, DIM)
    written = used[:, None] & (column < dim)[None, :]
    if SPLIT:
        at = place * splits + split
        tl.store(logs + at, peak + tl.log2(total), mask=used)
        share = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(parts + at[:, None] * dim + column[None, :], share, mask=written)
    elif not NORMALIZED:
        tl.store(out + (place * dim)[:, None] + column[None, :], sums * tl.exp2(peak)[:, None], mask=written)
    else:
        if SINK_LOGITS:
            sink = tl.load(sink_logits + head, mask=used, other=0.0).to(tl.float32) * LOG2E
            higher = tl.maximum(peak, sink)
            base = tl.where(higher == -float("inf"), 0.0, higher)
            fade = tl.exp2(peak - base)
            total = total * fade + tl.exp2(sink - base)
            sums = sums * fade[:, None]
        mixed = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + (place * dim)[:, None] + column[None, :], mixed, mask=written)


@triton.jit
def scale_scores(
    scores, scale, softcap, head, positions, key, allowed, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Scale products of queries [ROWS] and keys [TILE] to scores in base 2, and apply the user's mask and score
    function. Scores that are not `allowed` become minus infinity."""
    if SOFTCAP:
        capped = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * (scores * (scale / softcap))))  # tanh
        if SCORE is None:
            scores = capped * (softcap * LOG2E)
        else:
            scores = SCORE(capped * softcap, head[:, None], positions[:, None], key[None, :]) * LOG2E
    elif SCORE is None:
        scores = scores * (scale * LOG2E)
    else:
        scores = SCORE(scores * scale, head[:, None], positions[:, None], key[None, :]) * LOG2E
    if MASK is not None:
        allowed = allowed & MASK(positions[:, None], key[None, :], head[:, None])
    return tl.where(allowed, scores, -float("inf"))


@triton.jit
def update_softmax(
    sums, peak, total, q, k, v, allowed, scale, softcap, head, positions, key, dtype: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Update the running softmax (Milakov and Gimelshein, 2018), in base 2, with a tile of keys [DIM, TILE] and values
    [TILE, DIM], for the pairs that are `allowed` [ROWS, TILE]."""
    scores = dot(q, operand(k, dtype), tl.zeros([q.shape[0], k.shape[1]], tl.float32))
    scores = scale_scores(scores, scale, softcap, head, positions, key, allowed, SOFTCAP, SCORE, MASK)
    v = operand(v, dtype)
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # rows that have seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, axis=1)
    sums = dot(operand(weights, dtype), v, sums * fade[:, None])
    return sums, higher, total


@triton.jit
def attend_tile(
    sums, peak, total, q, keys, values, table, tile, head, positions, first, last, scale,
    page_stride, dim, softcap, window, sinks, chosen, used,
    SIZE: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WHOLE_DIM: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with one tile of keys. Tiles are `MASKED` if some query may not see some key; keys
    outside every query's window, or in pages that no query selected, are not read. `chosen` points to the selected
    pages of each row."""
    key = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, DIM)
    wanted = key <= last
    if WINDOW:
        wanted = wanted & ((key > first - window) | (key < sinks))
    read_by = tl.full([1, 1], True, tl.int1)
    if CHOSEN:
        read_by = tl.load(chosen[:, None] + (key // SIZE)[None, :], mask=used[:, None] & wanted[None, :], other=0) != 0
        wanted = wanted & (tl.max(read_by.to(tl.int32), axis=0) > 0)
    if SIZE % TILE == 0:  # the tile lies within one page
        page = tl.load(table + tile * TILE // SIZE).to(tl.int64)
    elif MASKED:
        page = tl.load(table + key // SIZE, mask=wanted, other=0).to(tl.int64)
    else:
        page = tl.load(table + key // SIZE).to(tl.int64)
    at = (page * page_stride + key % SIZE * dim)[:, None] + column[None, :]
    if MASKED:
        read = wanted[:, None] & (column < dim)[None, :]
        k = tl.load(keys + at, mask=read, other=0.0)
        v = tl.load(values + at, mask=read, other=0.0)
    elif WHOLE_DIM:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    else:
        k = tl.load(keys + at, mask=(column < dim)[None, :], other=0.0)
        v = tl.load(values + at, mask=(column < dim)[None, :], other=0.0)

    allowed = tl.full([1, 1], True, tl.int1)
    if MASKED:
        allowed = key[None, :] <= positions[:, None]
        if WINDOW:
            allowed = allowed & ((key[None, :] > positions[:, None] - window) | (key < sinks)[None, :])
    allowed = allowed & read_by
    return update_softmax(
        sums, peak, total, q, tl.trans(k), v, allowed, scale, softcap, head, positions, key, v.dtype, SOFTCAP, MASK,
        SCORE,
    )  # fmt: skip


# One kernel for all of these.
@triton.jit(do_not_specialize=["seqs", "table_stride", "chosen_stride", "held", "splits", "window", "sinks"])
def attend(
    q, keys, values, page_table, chosen_pages, span_starts, context_lengths, sink_logits, out, parts, logs,
    seqs, table_stride, chosen_stride, held, heads, groups, dim, splits, q_token, q_head, q_dim, page_stride,
    group_stride, scale, softcap, window, sinks,
    SHARE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    DIM: tl.constexpr, WHOLE_DIM: tl.constexpr, KIND: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINK_LOGITS: tl.constexpr, MASK: tl.constexpr, REACH: tl.constexpr, SCORE: tl.constexpr,
    NORMALIZED: tl.constexpr, CHOSEN: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    mine = span_at(span_starts, seqs, block, TOKENS, KIND)
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

    column = tl.arange(0, DIM)
    written = used[:, None] & (column < dim)[None, :]
    line = (start + token).to(tl.int64)
    q_at = (line * q_token + head * q_head)[:, None] + (column * q_dim)[None, :]
    queries = tl.load(q + q_at, mask=written, other=0.0)

    # Tiles in the order of the walk: `early` ones of the sinks, then [begin, end).
    end = last // TILE + 1
    early = 0
    begin = 0
    if WINDOW:
        early = tl.minimum((sinks + TILE - 1) // TILE, end)
        begin = tl.maximum(early, tl.maximum(first - window + 1, 0) // TILE)
    steps = early + end - begin
    each = (steps + splits - 1) // splits
    step = split * each
    stop = tl.minimum(step + each, steps)
    clear = step  # begin of tiles with keys that some query may not see
    if not WINDOW and MASK is None and not CHOSEN:
        clear = tl.maximum(step, tl.minimum((first + 1) // TILE, stop))

    sums = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    table = page_table + seq.to(tl.int64) * table_stride
    k_group = keys + group * group_stride
    v_group = values + group * group_stride
    chosen = chosen_pages + line * chosen_stride + group * held
    if not WINDOW and MASK is None and not CHOSEN:
        for i in range(step, clear):
            sums, peak, total = attend_tile(
                sums, peak, total, queries, k_group, v_group, table, i, head, positions, first, last, scale,
                page_stride, dim, softcap, window, sinks, chosen, used, SIZE, TILE, DIM, WHOLE_DIM, False, False,
                SOFTCAP, None, SCORE, False,
            )  # fmt: skip
    for i in range(clear, stop):
        tile = i
        if WINDOW:
            tile = tl.where(i < early, i, i - early + begin)
        needed = True
        if REACH is not None:
            needed = REACH(first, last, tile * TILE, tile * TILE + TILE - 1, group * SHARE, group * SHARE + SHARE - 1)
        if CHOSEN:  # a tile lies in one page, or begins with a page
            page = tile * TILE // SIZE + tl.arange(0, PAGES)
            inside = (page < held) & (page * SIZE < tile * TILE + TILE)
            some = tl.load(chosen[:, None] + page[None, :], mask=used[:, None] & inside[None, :], other=0)
            needed = needed & (tl.max(some.to(tl.int32)) > 0)
        if needed:
            sums, peak, total = attend_tile(
                sums, peak, total, queries, k_group, v_group, table, tile, head, positions, first, last, scale,
                page_stride, dim, softcap, window, sinks, chosen, used, SIZE, TILE, DIM, WHOLE_DIM, True, WINDOW,
                SOFTCAP, MASK, SCORE, CHOSEN,
            )  # fmt: skip

    store_result(
        out, parts, logs, sink_logits, sums, peak, total, line * heads + head, used, head, split, splits, dim,
        DIM, SPLIT, SINK_LOGITS, NORMALIZED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seqs", "splits"])
def merge(
    parts, logs, sink_logits, span_starts, out, seqs, heads, dim, splits,
    SPLITS: tl.constexpr, DIM: tl.constexpr, WHOLE_DIM: tl.constexpr, KIND: tl.constexpr, SINK_LOGITS: tl.constexpr,
    NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one head of one token. Each part is weighted by its share of the sum of exponentials, or by
    its own sum if weights are not `NORMALIZED`."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if KIND != ANY:
        seq = span_of(span_starts, seqs, token, 0)
        single = tl.load(span_starts + seq + 1) - tl.load(span_starts + seq) == 1
        if single != (KIND == SINGLE):
            return
    line = token.to(tl.int64) * heads + head
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    inside = split < splits
    log = tl.load(logs + line * splits + split, mask=inside, other=-float("inf"))
    peak = tl.max(log, axis=0)
    sink = -float("inf")
    if SINK_LOGITS:
        sink = tl.load(sink_logits + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    if not NORMALIZED:
        base = 0.0
    weights = tl.exp2(log - base)
    total = tl.sum(weights, axis=0)
    if SINK_LOGITS:
        total += tl.exp2(sink - base)
    at = (line * splits + split)[:, None] * dim + column[None, :]
    part = tl.load(parts + at, mask=inside[:, None] & (column < dim)[None, :], other=0.0)
    mixed = tl.sum(part * weights[:, None], axis=0)
    if NORMALIZED:
        mixed /= tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * dim + column, mixed, mask=column < dim)
