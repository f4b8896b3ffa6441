"""The lane mlir of the write: each row is copied to its page's offset, one group after another."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor

from compiled_kernels.cases import Case
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir_text import PAGES, TYPES, memref
from compiled_kernels.openmp import Call


def kv_write(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    rows = rows.to(pages.dtype).contiguous()
    kernel = _compiled(*rows.shape, pages.shape[2], TYPES[pages.dtype])
    Call(kernel.address, (pages, rows, slots.long().contiguous()))(threads=1)


def stages(case: Case, operator: str = "kv_write") -> Mapping[str, str]:
    """Every stage of the function that runs for `case`."""
    of = case.arguments
    return _compiled(of["tokens"], of["groups"], of["dim"], of["size"], TYPES[of["dtype"]]).stages


@functools.lru_cache(maxsize=512)
def _compiled(tokens: int, groups: int, dim: int, size: int, kind: str) -> Kernel:
    return compile_text(_text(tokens, groups, dim, size, kind), "kv_write")


def _text(tokens: int, groups: int, dim: int, size: int, kind: str) -> str:
    """@kv_write(pages [page, group, offset, dim], rows [token, group, dim], slots [token]): the row of a token goes
    to page slot // size, offset slot % size."""
    pages, rows, slots = (
        memref((PAGES, groups, size, dim), kind),
        memref((tokens, groups, dim), kind),
        memref((tokens,), "i64"),
    )
    return f"""func.func @kv_write(%pages: {pages}, %rows: {rows}, %slots: {slots}) {{
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %tokens = arith.constant {tokens} : index
  %groups = arith.constant {groups} : index
  %dim = arith.constant {dim} : index
  %size = arith.constant {size} : index
  scf.for %token = %zero to %tokens step %one {{
    %slot64 = memref.load %slots[%token] : {slots}
    %slot = arith.index_cast %slot64 : i64 to index
    %page = arith.divui %slot, %size : index
    %offset = arith.remui %slot, %size : index
    scf.for %group = %zero to %groups step %one {{
      scf.for %d = %zero to %dim step %one {{
        %value = memref.load %rows[%token, %group, %d] : {rows}
        memref.store %value, %pages[%page, %group, %offset, %d] : {pages}
      }}
    }}
  }}
  return
}}"""
