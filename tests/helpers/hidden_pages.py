"""Attention over pages, of which those that no query may read hold NaN: reading one shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.cases import suite_of
from compiled_kernels.masks import AndMask, Causal, SlidingWindow
from tests.helpers.kernels import kernel_problem

SIZE = 64
CHOSEN = "chosen pages"


def one_block_in_three(query: Tensor, key: Tensor) -> Tensor:
    return (query // SIZE - key // SIZE) % 3 == 0


def hashed_blocks(query: Tensor, key: Tensor) -> Tensor:
    """The query's own block, and one in four by a hash of their numbers."""
    chosen = ((query // SIZE * 2654435761 ^ key // SIZE * 40503) % 2**32) % 4 == 0
    return chosen | (query // SIZE == key // SIZE)


BANDS = {"causal": Causal(), "window": SlidingWindow(200)}
MASKS = {"one in three": one_block_in_three, "hashed": hashed_blocks}


def hidden_page_problem(
    operator: str, backend: Backend, band: str, shown: str, spans: tuple[int, ...]
) -> str | None:
    """Return how a backend's result differs from float64's where pages are hidden by a mask of blocks within a band, or
    are not among the chosen ones; None where it does not."""
    contexts = (447, 130, 64)[: len(spans)]  # spans lie within one block: bounds are exact then
    arguments: dict[str, Any] = {
        "contexts": contexts, "spans": spans, "num_kv_heads": 2, "queries_per_kv": 3, "dim": 16, "size": SIZE,
        "dtype": torch.float32,
    }  # fmt: skip
    arguments |= {"selected": 0.0} if shown == CHOSEN else {"mask": AndMask(BANDS[band], MASKS[shown])}
    if operator == "quantized_attention":
        arguments |= {"formats": ("int8", "int4"), "run": 16, "columns": 16, "lag": 32}
    inputs = suite_of(operator).input_maker(torch.Generator().manual_seed(1), **arguments)
    kv, step, parameters = inputs[1:]
    if shown == CHOSEN:  # for all queries and for one key/value head, beside their own
        kv.chosen[:, :, 1] = True
        kv.chosen[:, 0, 2] = True
    hidden = 0
    for seq, rows, context in step.listed():
        at = torch.arange(context)
        if shown == CHOSEN:
            kv.chosen[rows, :, -(-context // SIZE) :] = False
        for page, keys in enumerate(at.split(SIZE)):
            by_mask = parameters.mask(at[context - (rows.stop - rows.start) :, None], keys[None])
            if not bool((kv.chosen[rows, :, page] if shown == CHOSEN else by_mask).any()):
                hidden += 1
                _poison(kv, seq, page)
    assert hidden, "no page is hidden, so nothing is tested"
    return kernel_problem(operator, backend, arguments, inputs=inputs)


def _poison(kv: Any, seq: int, page: int) -> None:
    """Make everything that a page holds NaN: of codes, their scales."""
    for name in ("keys", "values", "residual_keys", "residual_values"):
        pool = getattr(kv, name, None)
        if isinstance(pool, Tensor):
            pool[int(kv.tables[-1][seq, page])] = torch.nan
        elif pool is not None and pool.scales is not None:
            pool.scales[int(kv.tables[0][seq, page])] = torch.nan
