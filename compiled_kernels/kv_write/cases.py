from __future__ import annotations

import torch

import compiled_kernels
from compiled_kernels.cases import Case, CaseCost, Suite, random_normal
from compiled_kernels.kv_write.api import kv_write_reference


def inputs(
    generator: torch.Generator, tokens: int, pages: int, num_kv_heads: int, size: int, dim: int, dtype: torch.dtype
) -> tuple:
    """Draw inputs: unwritten parts of pages are NaN; rows are a slice of wider rows, as in a fused projection."""
    slots = torch.randperm(pages * size, generator=generator)[:tokens] + size
    rows = random_normal(generator, dtype, (tokens, num_kv_heads + 1, dim))[:, 1:]
    return torch.full((pages + 1, num_kv_heads, size, dim), torch.nan, dtype=dtype), rows, slots


def written(pages, rows, slots, backend):
    """Return a copy of the pages in which the rows are written."""
    pages = pages.clone()
    compiled_kernels.kv_write(pages, rows, slots, backend)
    return pages


def in_place(pages, rows, slots, backend):
    """Write the rows into the pages without a copy, for benchmarks: repetitions write the same values."""
    compiled_kernels.kv_write(pages, rows, slots, backend)
    return pages


def exact(pages, rows, slots):
    pages = pages.double()
    kv_write_reference(pages, rows.double(), slots)
    return pages


SUITES = (
    Suite(
        "kv_write",
        inputs,
        written,
        tuple(
            Case(
                f"{tokens}x{groups}x{dim}",
                {"tokens": tokens, "pages": pages, "num_kv_heads": groups, "size": size, "dim": dim, "dtype": dtype},
                CaseCost(2 * tokens * groups * dim * dtype.itemsize, 0),
                timed=dim == 64 and dtype == torch.bfloat16,
            )
            for tokens, pages, groups, size, dim in [
                (1, 4, 3, 64, 64),
                (16, 9, 3, 32, 64),
                (512, 9, 4, 64, 64),
                (5, 4, 1, 3, 6),
            ]
            for dtype in (torch.float32, torch.bfloat16)
        ),
        exact=exact,
        benchmark_call=in_place,
        rounding_terms=lambda **_: 0,
    ),
)
