"""Pages behind a window may be given back: what stands in the null page in their place changes no bit of a result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_kernels
from compiled_kernels import Backend, backend_problems
from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.masks import SlidingWindow
from compiled_kernels.paged_attention import PagedKV
from tests.thorough import tries

NARROW, SINKS, WIDE = (
    (SlidingWindow(7), 4, 0.0),
    (SlidingWindow(9, num_sink_tokens=6), 4, 5.0),
    (SlidingWindow(40), 16, 0.0),
)
# The backend triton by the cases of `paged_attention` in the interpreter, whose windows have left pages behind.
TRIED = {Backend.EAGER: (NARROW, SINKS, WIDE), Backend.INDUCTOR: (SINKS,), Backend.MLIR: (NARROW, SINKS, WIDE)}
BACKENDS = [
    pytest.param(backend, *shape, marks=pytest.mark.skipif(problem is not None, reason=f"backend {backend}: {problem}"))
    for backend, problem in backend_problems().items()
    for shape in TRIED.get(backend, ())
]
GROUPS, SHARE, DIM, CONTEXT = 2, 2, 16, 160
spans = st.lists(st.tuples(st.integers(1, CONTEXT), st.sampled_from([1, 1, 9, 33, CONTEXT])), min_size=1, max_size=3)


@pytest.mark.parametrize(("backend", "mask", "size", "softcap"), BACKENDS)
@settings(max_examples=tries(8), deadline=None)
@given(drawn=spans, seed=st.integers(0, 99))
def test_null_pages_are_behind_the_mask(
    backend: Backend, mask: SlidingWindow, size: int, softcap: float, drawn: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    if backend is Backend.INDUCTOR:  # compiles for each number of rows
        drawn = [(104, 1), (57, 1), (150, 9)]
    drawn = sorted(((context, min(span, context)) for context, span in drawn), key=lambda each: each[1] > 1)
    held = CONTEXT // size
    keys, values = torch.randn(2, len(drawn) * held + 1, GROUPS, size, DIM, generator=generator)
    keys[0], values[0] = torch.nan, torch.nan
    whole = torch.randperm(len(drawn) * held, generator=generator).view(len(drawn), held).int() + 1
    left = whole.clone()
    for seq, (context, span) in enumerate(drawn):
        whole[seq, -(-context // size) :] = left[seq, -(-context // size) :] = 0
        reach = max(0, context - span - mask.sliding_window + 1)
        left[seq, -(-mask.num_sink_tokens // size) : reach // size] = 0
    starts = torch.tensor([0, *torch.tensor([span for _, span in drawn]).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), GROUPS * SHARE, DIM, generator=generator)
    lengths = torch.tensor([context for context, _ in drawn], dtype=torch.int32)
    decodes = all(span == 1 for _, span in drawn)
    rest = Spans(starts, lengths, decodes), AttentionParameters(DIM**-0.5, mask, softcap), backend
    before, after = (
        compiled_kernels.paged_attention(q, PagedKV(keys, values, table), *rest) for table in (whole, left)
    )
    assert after.isfinite().all()
    assert torch.equal(before, after)
