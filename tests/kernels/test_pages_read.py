"""Which pages attention reads: none that a mask hides from all queries, that no query chose, or that a window has left;
and a query without keys, or one that is no number, spoils nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.cases import suite_of
from compiled_kernels.masks import SlidingWindow
from compiled_kernels.paged_attention import PagedKV
from tests.helpers.hidden_pages import BANDS, CHOSEN, MASKS, hidden_page_problem
from tests.helpers.kernels import PROBLEMS
from tests.helpers.rows import rows
from tests.kernels.kernel_rows import KERNELS, refused
from tests.thorough import THOROUGH, run_seed

BACKENDS = [Backend.EAGER, Backend.INDUCTOR, Backend.MLIR]  # triton: interpreted/laws.py
MIXED = (1, 1, 40)


def skip_without(backend: Backend) -> None:
    if PROBLEMS[backend]:
        pytest.skip(f"backend {backend}: {PROBLEMS[backend]}")


def few_graphs(operator: str, backend: Backend, shown: str, spans: tuple[int, ...], **_: Any) -> bool:
    """Pages are chosen for paged attention alone; Inductor compiles graphs for decodes under such masks."""
    graph = backend is Backend.INDUCTOR and spans[0] == 1 and not THOROUGH
    return not graph and (shown != CHOSEN or operator == "paged_attention")


@rows(
    {
        "operator": ["paged_attention", "quantized_attention"], "backend": BACKENDS, "band": list(BANDS),
        "shown": [*MASKS, CHOSEN], "spans": [(1, 1, 1), MIXED, (3, 1, 1), (40,)],
    },
    {"backend": Backend.INDUCTOR, "shown": "hashed", "spans": MIXED},
    valid=few_graphs,
)  # fmt: skip
def test_hidden_pages_are_not_read(
    operator: str, backend: Backend, band: str, shown: str, spans: tuple[int, ...]
) -> None:
    skip_without(backend)
    assert hidden_page_problem(operator, backend, band, shown, spans) is None


GROUPS, SHARE, DIM, CONTEXT = 2, 2, 16, 160
BATCHES = {  # (context, span): decodes first
    "decodes and a span": [(104, 1), (57, 1), (150, 9)],
    "at a page's ends": [(15, 1), (16, 1), (17, 1)],
    "whole": [(CONTEXT, CONTEXT)],
    "spans": [(64, 33), (41, 9)],
}


@rows(
    {
        "backend": BACKENDS, "batch": list(BATCHES), "sinks": [6, 0, 4], "window": [9, 7, 40], "size": [4, 16],
        "softcap": [5.0, 0.0],
    },
    {"backend": Backend.INDUCTOR},
    valid=lambda backend, batch, **_: backend is not Backend.INDUCTOR or batch != "decodes and a span" or THOROUGH,
)  # fmt: skip
def test_pages_given_back_change_no_bit(
    backend: Backend, batch: str, sinks: int, window: int, size: int, softcap: float
) -> None:
    """What stands in the null page, in the place of pages that a window has left behind, is not read."""
    skip_without(backend)
    generator, mask = torch.Generator().manual_seed(run_seed()), SlidingWindow(window, num_sink_tokens=sinks)
    spans, held = BATCHES[batch], CONTEXT // size
    keys, values = torch.randn(2, len(spans) * held + 1, GROUPS, size, DIM, generator=generator)
    keys[0], values[0] = torch.nan, torch.nan
    whole = torch.randperm(len(spans) * held, generator=generator).view(len(spans), held).int() + 1
    left = whole.clone()
    for seq, (context, span) in enumerate(spans):
        whole[seq, -(-context // size) :] = left[seq, -(-context // size) :] = 0
        left[seq, -(-sinks // size) : max(0, context - span - window + 1) // size] = 0
    lengths, counts = torch.tensor(spans, dtype=torch.int32).unbind(1)
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    q = torch.randn(int(starts[-1]), GROUPS * SHARE, DIM, generator=generator)
    rest = Spans(starts, lengths.clone(), bool((counts == 1).all())), AttentionParameters(DIM**-0.5, mask, softcap)
    before, after = (
        compiled_kernels.paged_attention(q, PagedKV(keys, values, table), *rest, backend) for table in (whole, left)
    )
    assert after.isfinite().all() and torch.equal(before, after)


DECODES = [
    (backend, row)
    for row in KERNELS["paged_attention"].rows()
    for backend in (Backend.EAGER, Backend.INDUCTOR)
    if set(row["spans"]) == {1} and not refused("paged_attention", backend, row)
]


@pytest.mark.parametrize(("backend", "row"), DECODES)
def test_nan_stays_with_its_query(backend: Backend, row: dict[str, Any]) -> None:
    suite = suite_of("paged_attention")
    inputs = list(suite.input_maker(torch.Generator().manual_seed(run_seed()), **row))
    clean = suite.call(*inputs, backend=backend)
    inputs[0][0] = torch.nan
    out = suite.call(*inputs, backend=backend)
    # A head that sees no key (of the pages it reads) gives zeros, whatever the query is.
    assert torch.equal(out[0].isnan(), clean[0] != 0)
    assert torch.equal(out[1:], clean[1:])


class Nowhere:
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key < 0) & (query < 0)


NOWHERE = [each for number, each in enumerate(DECODES) if each[0] is Backend.EAGER or number < 4]  # Inductor compiles a graph for each


@pytest.mark.parametrize(("backend", "row"), NOWHERE)
def test_query_that_may_look_nowhere_gives_zeros(backend: Backend, row: dict[str, Any]) -> None:
    suite = suite_of("paged_attention")
    *inputs, parameters = suite.input_maker(torch.Generator().manual_seed(run_seed()), **row)
    out = suite.call(*inputs, parameters._replace(mask=Nowhere()), backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
