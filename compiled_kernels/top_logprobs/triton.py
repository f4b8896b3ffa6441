"""Compute top log probabilities in two kernels. The first cuts each row into chunks, enough to fill the device, and
stores each chunk's maximum, sum and largest entries; the second merges them, with one program for each row. Entries are
stored as integers that sort by logit, then by smaller id."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, check, power_of_two, run

CHUNK = 2048  # logits a program
MAX_ENTRIES = 128  # entries a row: each is one search of a chunk, and of all candidates after
CANDIDATES_A_WARP = 512

SIGN = tl.constexpr(0x7FFFFFFF)  # all bits but the sign; the largest int32 less n is n ^ SIGN
NOTHING = tl.constexpr(-(2**63))  # below any entry


@triton.jit(do_not_specialize=["chunks", "count"])
def survey(logits, maxima, sums, keys, vocab, chunks, row_stride, column_stride, count, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row * row_stride + ids * column_stride, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    tl.store(maxima + row * chunks + chunk, peak)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    ordered = tl.where(x != x, SIGN, tl.where(bits < 0, bits ^ SIGN, bits))  # NaN comes first, as in torch.sort
    key = tl.where(inside, (ordered.to(tl.int64) << 32) | (ids ^ SIGN).to(tl.int64), NOTHING)
    # The chunk's largest value is left out of its sum (its exponential is 1), so that the logarithm of a sum near 1
    # keeps its precision. A chunk of -inf only adds nothing; a NaN reaches the sum even if the maximum ignores it.
    weights = tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak))
    largest = (key == tl.max(key, axis=0)) & (x == peak) & (x > -float("inf"))
    tl.store(sums + row * chunks + chunk, tl.sum(tl.where(largest, weights - 1.0, weights), axis=0))
    for rank in range(count):
        best = tl.max(key, axis=0)
        tl.store(keys + (row * chunks + chunk) * count + rank, best)
        key = tl.where(key == best, NOTHING, key)  # no two entries are equal


@triton.jit(do_not_specialize=["chunks", "count"])
def gather(maxima, sums, keys, logprobs, ids, chunks, count, CHUNKS: tl.constexpr, PLACES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    peaks = tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    parts = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    peak = tl.max(peaks, axis=0)
    first = tl.min(tl.where(peaks == peak, chunk, CHUNKS), axis=0)
    # The row's largest value is left out as well; a chunk of -inf only has no largest value, and its sum is 0 or NaN.
    scaled = tl.where(chunk == first, parts, parts + 1.0) * tl.exp(peaks - peak)
    rest = tl.sum(tl.where(peaks == -float("inf"), parts, scaled), axis=0)
    whole = 1.0 + rest
    log_total = tl.where(whole == 1.0, rest, tl.log(whole) * (rest / (whole - 1.0)))  # log1p (Kahan)
    place = tl.arange(0, PLACES)
    candidates = tl.load(keys + row * chunks * count + place, mask=place < chunks * count, other=NOTHING)
    for rank in range(count):
        best = tl.max(candidates, axis=0)
        candidates = tl.where(candidates == best, NOTHING, candidates)
        ordered = (best >> 32).to(tl.int32)
        x = tl.where(ordered < 0, ordered ^ SIGN, ordered).to(tl.float32, bitcast=True)
        tl.store(logprobs + row * count + rank, (x - peak) - log_total)
        tl.store(ids + row * count + rank, (best & SIGN) ^ SIGN)


def plan(logits: Tensor, count: int) -> tuple[list[KernelLaunch], tuple[Tensor, Tensor]]:
    check("top_logprobs", logits)
    samples, vocab = logits.shape
    if not 1 <= count <= min(vocab, MAX_ENTRIES):
        raise BackendError(
            f"top_logprobs: backend triton gives 1 to {min(vocab, MAX_ENTRIES)} entries of {vocab}, not {count}"
        )
    chunks = ceil_div(vocab, CHUNK)
    maxima, sums = (logits.new_empty((samples, chunks), dtype=torch.float32) for _ in range(2))
    keys = logits.new_empty((samples, chunks, count), dtype=torch.int64)
    logprobs = logits.new_empty(samples, count)
    ids = logits.new_empty((samples, count), dtype=torch.int64)
    between = {"maxima": maxima, "sums": sums, "keys": keys, "chunks": chunks, "count": count}
    first = between | {
        "logits": logits, "vocab": vocab, "row_stride": logits.stride(0), "column_stride": logits.stride(1),
        "CHUNK": CHUNK,
    }  # fmt: skip
    places = power_of_two(chunks * count)
    second = between | {"logprobs": logprobs, "ids": ids, "CHUNKS": power_of_two(chunks), "PLACES": places}
    warps = min(16, max(4, places // CANDIDATES_A_WARP))
    return [KernelLaunch(survey, (samples, chunks), first), KernelLaunch(gather, (samples,), second, warps)], (
        logprobs,
        ids,
    )


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return run(*plan(logits, count))
