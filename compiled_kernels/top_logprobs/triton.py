"""A row is cut into chunks that fill the device: each leaves its maximum, its sum and its largest entries; one
program a row puts them together. Entries travel as integers that order like the pair (logit, smaller id first)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.lanes import LaneError
from compiled_kernels.triton_code.launch import Launch, blocks, check, power_of_two, run

CHUNK = 2048  # logits a program
MOST = 1024  # entries a row; beyond it the last program's candidates do not fit its registers

SIGN = tl.constexpr(0x7FFFFFFF)  # all bits but the sign, and the largest int32
NOTHING = tl.constexpr(-(2**63))  # below any entry


@triton.jit
def survey(logits, maxima, sums, keys, vocab, chunks, row_stride, column_stride, CHUNK: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row * row_stride + ids * column_stride, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    tl.store(maxima + row * chunks + chunk, peak)
    # A chunk of -inf alone adds nothing; a NaN reaches the sum, whatever the maximum makes of it.
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), axis=0))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    ordered = tl.where(x != x, SIGN, tl.where(bits < 0, bits ^ SIGN, bits))  # NaN comes first, as in torch.sort
    key = tl.where(inside, (ordered.to(tl.int64) << 32) | (SIGN - ids).to(tl.int64), NOTHING)
    tl.store(keys + (row * chunks + chunk) * K + tl.arange(0, K), tl.topk(key, K))


@triton.jit
def gather(maxima, sums, keys, logprobs, ids, chunks, count, CHUNKS: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    parts = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks, axis=0)
    total = tl.sum(tl.where(peaks == -float("inf"), parts, parts * tl.exp(peaks - peak)), axis=0)
    place = tl.arange(0, CHUNKS * K)
    candidates = tl.load(keys + row * chunks * K + place, mask=place < chunks * K, other=NOTHING)
    key = tl.topk(candidates, K)
    rank = tl.arange(0, K)
    ordered = (key >> 32).to(tl.int32)
    x = tl.where(ordered < 0, ordered ^ SIGN, ordered).to(tl.float32, bitcast=True)
    tl.store(logprobs + row * count + rank, (x - peak) - tl.log(total), mask=rank < count)
    tl.store(ids + row * count + rank, SIGN - (key & SIGN), mask=rank < count)


def plan(logits: Tensor, count: int) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    check("top_logprobs", logits)
    samples, vocab = logits.shape
    if not 1 <= count <= min(vocab, MOST):
        raise LaneError(f"top_logprobs: lane triton gives 1 to {min(vocab, MOST)} entries of {vocab}, not {count}")
    k = power_of_two(count, least=2)
    chunk = max(CHUNK, 2 * k)
    chunks = blocks(vocab, chunk)
    maxima, sums = (logits.new_empty((samples, chunks), dtype=torch.float32) for _ in range(2))
    keys = logits.new_empty((samples, chunks, k), dtype=torch.int64)
    logprobs = logits.new_empty(samples, count)
    ids = logits.new_empty((samples, count), dtype=torch.int64)
    between = {"maxima": maxima, "sums": sums, "keys": keys, "chunks": chunks, "K": k}
    first = between | {
        "logits": logits, "vocab": vocab, "row_stride": logits.stride(0), "column_stride": logits.stride(1),
        "CHUNK": chunk,
    }  # fmt: skip
    second = between | {"logprobs": logprobs, "ids": ids, "count": count, "CHUNKS": power_of_two(chunks)}
    return [Launch(survey, (samples, chunks), first), Launch(gather, (samples,), second)], (logprobs, ids)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return run(*plan(logits, count))
