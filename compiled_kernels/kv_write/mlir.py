"""The backend mlir of the write: each row is copied to its page's offset, one group after another."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.cases import Case
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import FLOAT_DTYPES, INDEX_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, SIZE_BOUND, THREADS, Lines, Target, largest_divisor, memref

SINGLE_THREAD_TOKENS = 64  # tokens that one thread writes before a second one would be awake


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


def stages(case: Case, operator: str = "kv_write") -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    of = case.arguments
    return _compiled(Target.current(), of["num_kv_heads"], of["dim"], of["size"], MLIR_TYPES[of["dtype"]]).stages


@functools.lru_cache(maxsize=512)
def _compiled(target: Target, groups: int, dim: int, size: int, kind: str) -> Kernel:
    text = f"{THREADS}\n{_text(groups, dim, size, kind)}"
    return compile_text(text, "kv_write", level=target.level, libraries=(libgomp_path(),))


def _text(groups: int, dim: int, size: int, kind: str) -> str:
    """Emit @kv_write(pages [page, group, offset, dim], rows, slots [token], (tokens, numbers from row to row, slots of
    the pages, 0)), run by all threads at once: the row [group, dim] of a token goes to page slot // size, offset slot
    % size. One function for any number of tokens, and for rows that are part of wider ones. A slot beyond the pages is
    passed over, and the last of the sizes becomes 1."""
    pages, rows = memref((SIZE_BOUND, groups, size, dim), kind), memref((SIZE_BOUND,), kind)
    slots, sizes = memref((SIZE_BOUND,), "i64"), memref((4,), "i64")
    return f"""func.func @kv_write(%pages: {pages}, %rows: {rows}, %slots: {slots}, %sizes: {sizes}) {{
%thread, %threads = call @thread() : () -> (index, index)
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%tokens64 = memref.load %sizes[%zero] : {sizes}
%tokens = arith.index_cast %tokens64 : i64 to index
%stride64 = memref.load %sizes[%one] : {sizes}
%stride = arith.index_cast %stride64 : i64 to index
%two = arith.constant 2 : index
%limit64 = memref.load %sizes[%two] : {sizes}
%limit = arith.index_cast %limit64 : i64 to index
%size = arith.constant {size} : index
scf.for %token = %thread to %tokens step %threads {{
  %slot64 = memref.load %slots[%token] : {slots}
  %slot = arith.index_cast %slot64 : i64 to index
  %page = arith.divui %slot, %size : index
  %offset = arith.remui %slot, %size : index
  %row = arith.muli %token, %stride : index
  %inside = arith.cmpi ult, %slot, %limit : index
  scf.if %inside {{
{_copied(groups, dim, pages, rows, kind)}
  }} else {{
    %three = arith.constant 3 : index
    %outside = arith.constant 1 : i64
    memref.store %outside, %sizes[%three] : {sizes}
  }}
}}
return
}}"""


def _copied(groups: int, dim: int, pages: str, rows: str, kind: str) -> str:
    """Emit one token's row, a vector at a time."""
    lines, lanes = Lines(), largest_divisor(dim, 32)
    for group in range(groups):
        for column in range(0, dim, lanes):
            at = lines.let(f"arith.addi %row, {lines.index(group * dim + column)} : index")
            value = lines.load("%rows", at, rows, lanes, kind)
            place = f"%page, {lines.index(group)}, %offset, {lines.index(column)}"
            lines.store(value, "%pages", place, pages, lanes, kind)
    return lines.text()
