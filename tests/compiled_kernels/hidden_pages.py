"""Attention under a mask of blocks over pages, of which those that the mask hides hold NaN: reading one shows."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.agreement import disagreement
from compiled_kernels.cases import Case, CaseCost, suite_of
from compiled_kernels.masks import AndMask, Causal, SlidingWindow

SIZE = 64
BANDS = {"causal": Causal(), "window": SlidingWindow(200)}


def one_block_in_three(query: Tensor, key: Tensor) -> Tensor:
    return (query // SIZE - key // SIZE) % 3 == 0


def hashed_blocks(query: Tensor, key: Tensor) -> Tensor:
    """The query's own block, and one in four by a hash of their numbers."""
    chosen = ((query // SIZE * 2654435761 ^ key // SIZE * 40503) % 2**32) % 4 == 0
    return chosen | (query // SIZE == key // SIZE)


MASKS = {"one in three": one_block_in_three, "hashed": hashed_blocks}


def problem(operator: str, backend: Backend, band: str, mask: str, spans: tuple[int, ...], seed: int) -> str | None:
    """Return how a backend's result differs from the specification's; None where it agrees."""
    suite = suite_of(operator)
    contexts = (447, 130, 64)[: len(spans)]  # spans lie within one block: bounds are exact then
    arguments = {
        "contexts": contexts, "spans": spans, "num_kv_heads": 2, "queries_per_kv": 3, "dim": 16, "size": SIZE,
        "dtype": torch.float32, "mask": AndMask(BANDS[band], MASKS[mask]),
    }  # fmt: skip
    if operator == "quantized_attention":
        arguments |= {"formats": ("int8", "int4"), "run": 16, "columns": 16, "lag": 32}
    q, kv, step, parameters = suite.input_maker(torch.Generator().manual_seed(seed), **arguments)
    hidden = 0
    for seq, (context, span) in enumerate(zip(contexts, spans, strict=True)):
        at = torch.arange(context)
        seen = parameters.mask(at[context - span :, None], at[None]).any(0)
        for page in range(-(-context // SIZE)):
            if not bool(seen[page * SIZE : (page + 1) * SIZE].any()):
                hidden += 1
                _poison(kv, seq, page)
    assert hidden, "no page is hidden, so nothing is tested"
    return disagreement(suite, Case("hidden pages", arguments, CaseCost(0, 0)), (q, kv, step, parameters), backend)


def _poison(kv: object, seq: int, page: int) -> None:
    """Make everything that a page holds NaN: of codes, their scales."""
    tables = [each for each in kv.tables]  # type: ignore[attr-defined]
    for name in ("keys", "values", "residual_keys", "residual_values"):
        pool = getattr(kv, name, None)
        if isinstance(pool, Tensor):
            pool[int(tables[-1][seq, page])] = torch.nan
        elif pool is not None and pool.scales is not None:
            pool.scales[int(tables[0][seq, page])] = torch.nan
