"""Implement the KV write for the backend mlir: each row is copied to its page and offset, head by head."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.builder.functions import loop, when
from compiled_kernels.builder.target import MLIR_TYPES, SIZE_BOUND, Named, Target, largest_divisor, memref
from compiled_kernels.builder.threads import entry
from compiled_kernels.builder.values import constant
from compiled_kernels.builder.vectors import copy
from compiled_kernels.mlir import Kernel, compile_entry
from compiled_kernels.mlir.invoke import FLOAT_DTYPES, INDEX_DTYPES, BoundCall, check_argument

SINGLE_THREAD_TOKENS = 64  # tokens that one thread writes before a second thread would have started


def kv_write(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    count, groups, size, dim = pages.shape
    tokens = rows.shape[0]
    check_argument("kv_write", "pages", pages, (count, groups, size, dim), tuple(MLIR_TYPES))
    check_argument("kv_write", "rows", rows, (tokens, groups, dim), FLOAT_DTYPES, contiguous=False)
    check_argument("kv_write", "slots", slots, (tokens,), INDEX_DTYPES, contiguous=False)
    rows, slots = rows.to(pages.dtype), slots.long().contiguous()
    if tokens and rows.stride()[1:] != (dim, 1):
        rows = rows.contiguous()
    kernel = _compiled(Target.current(), groups, dim, size, MLIR_TYPES[pages.dtype])
    sizes = torch.tensor([tokens, rows.stride(0), count * size, 0])
    BoundCall(kernel.address, (pages, rows, slots, sizes))(threads=1 if tokens < SINGLE_THREAD_TOKENS else None)
    if sizes[3]:
        raise BackendError(f"kv_write: slots must lie in 0..{count * size - 1}; {_range(slots)} given")


def _range(numbers: Tensor) -> str:
    return f"{int(numbers.min())}..{int(numbers.max())}"


@functools.lru_cache(maxsize=512)
def _compiled(target: Target, groups: int, dim: int, size: int, kind: str) -> Kernel:
    return compile_entry("kv_write", target.level, lambda: _write(groups, dim, size, kind))


def _write(groups: int, dim: int, size: int, kind: str) -> None:
    """Make @kv_write(pages [page, group, offset, dim], rows, slots [token], (tokens, numbers from row to row, slots of
    the pages, 0)), run by all threads at once: the row [group, dim] of a token goes to page slot // size, offset slot
    % size. One function for any number of tokens, and for rows that are part of wider ones. A slot beyond the pages is
    passed over, and the last of the sizes becomes 1."""
    pages, rows = memref((SIZE_BOUND, groups, size, dim), kind), memref((SIZE_BOUND,), kind)
    slots, sizes = memref((SIZE_BOUND,), "i64"), memref((4,), "i64")
    named = [Named("pages", pages), Named("rows", rows), Named("slots", slots), Named("sizes", sizes)]
    with entry("kv_write", named) as given:
        tokens, stride, limit = (given["sizes"][i].to("index") for i in range(3))
        with loop(given["thread"], tokens, given["threads"]) as token:
            slot = given["slots"][token.index].to("index")
            with when(slot.below(limit)) as otherwise, loop(0, groups) as group:
                place = slot // size, group.index, slot % size, 0
                row = token.index * stride + group.index * dim
                copy(given["rows"], (row,), given["pages"], place, dim, largest_divisor(dim, 32))
            with otherwise():
                given["sizes"][3] = constant(1, "i64")
