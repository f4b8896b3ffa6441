"""Every operator against its specification, computed in float64; unwritten memory is NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_kernels
from compiled_kernels import Lane
from compiled_kernels.gated.reference import reference as gated_reference
from compiled_kernels.kv_write.reference import reference as kv_write_reference
from compiled_kernels.linear.reference import reference as linear_reference
from compiled_kernels.paged_attention.reference import attend
from compiled_kernels.rms_norm.reference import reference as rms_norm_reference
from compiled_kernels.rotary.reference import reference as rotary_reference
from workbench.model.mask import Causal, SlidingWindow

DTYPES = [torch.float32, torch.bfloat16]
seeds = st.integers(0, 2**31)


def assert_near(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, terms: int) -> None:
    """Within the rounding of `terms` additions accumulated in float32 and one rounding to `dtype`."""
    scale = exact.abs().max().item() + 1.0
    bound = scale * (terms * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps)
    assert (actual.double() - exact).abs().max().item() <= bound


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 70), st.sampled_from(DTYPES))
def test_row_operators(seed: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 2 * width, generator=g).to(dtype)
    weight = torch.randn(2 * width, generator=g).to(dtype)
    exact = rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert_near(compiled_kernels.rms_norm(x, weight, 1e-5), exact, dtype, 2 * width)
    assert_near(compiled_kernels.gated_silu(x), gated_reference(x.double()), dtype, 8)
    heads = x.view(tokens, 1, 2 * width)
    angles = torch.rand(tokens, width, generator=g, dtype=torch.float64) * 6
    turned = rotary_reference(heads.double(), angles.cos(), angles.sin())
    assert_near(compiled_kernels.rotary(heads, angles.cos().float(), angles.sin().float()), turned, dtype, 8)


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.sampled_from(list(Lane)))
def test_linear(seed: int, tokens: int, width: int, out: int, with_bias: bool, lane: Lane) -> None:
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(tokens, width, generator=g), torch.randn(out, width, generator=g)
    bias = torch.randn(out, generator=g) if with_bias else None
    exact = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    assert_near(compiled_kernels.linear(x, weight, bias, lane), exact, torch.float32, 4 * width)


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(1, 4))
def test_kv_write_touches_its_slots_only(seed: int, pages: int, size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * size, generator=g)[: max(1, pages * size // 2)]
    rows = torch.randn(len(slots), 2, 3, generator=g)
    ours, theirs = (torch.full((pages, 2, size, 3), torch.nan) for _ in range(2))
    compiled_kernels.kv_write(ours, rows, slots)
    kv_write_reference(theirs, rows, slots)
    assert torch.equal(ours.nan_to_num(7e7), theirs.nan_to_num(7e7))
    assert int(ours.isnan().sum()) == (pages * size - len(slots)) * 6


@st.composite
def paged_cases(draw: st.DrawFn, decode_only: bool):
    """Spans over pages in random order; everything that belongs to no context is NaN."""
    seed, size = draw(seeds), draw(st.integers(1, 5))
    groups, share, dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), draw(st.sampled_from([2, 8]))
    contexts = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    spans = [1 if decode_only else draw(st.integers(1, context)) for context in contexts]
    g = torch.Generator().manual_seed(seed)
    counts = [-(-context // size) for context in contexts]
    order = (torch.randperm(sum(counts), generator=g) + 1).tolist()
    table = torch.zeros(len(contexts), max(2, *counts), dtype=torch.int32)
    keys, values = (torch.full((sum(counts) + 1, groups, size, dim), torch.nan) for _ in range(2))
    dense = []
    for seq, context in enumerate(contexts):
        k, v = (torch.randn(context, groups, dim, generator=g) for _ in range(2))
        dense.append((k, v))
        for page in range(counts[seq]):
            table[seq, page] = order.pop()
        for position in range(context):
            page, offset = int(table[seq, position // size]), position % size
            keys[page, :, offset], values[page, :, offset] = k[position], v[position]
    starts = torch.tensor([0, *torch.tensor(spans).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), groups * share, dim, generator=g)
    return q, keys, values, table, starts, torch.tensor(contexts, dtype=torch.int32), dense


def exact_attention(case, mask) -> torch.Tensor:
    q, _, _, _, starts, contexts, dense = case
    rows = []
    for seq, (k, v) in enumerate(dense):
        span = q[starts[seq] : starts[seq + 1]].double()
        rows.append(attend(span, k.double(), v.double(), int(contexts[seq]) - len(span), 0.3, mask))
    return torch.cat(rows)


MASKS = st.one_of(st.just(Causal()), st.integers(1, 6).map(SlidingWindow))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from(list(Lane)), MASKS)
def test_paged_attention(data: st.DataObject, decode_only: bool, lane: Lane, mask) -> None:
    case = data.draw(paged_cases(decode_only))
    out = compiled_kernels.paged_attention(*case[:6], 0.3, mask, decode_only, lane)
    assert_near(out, exact_attention(case, mask), torch.float32, 64)


class Nowhere:
    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key < 0) & (query < 0)


@pytest.mark.parametrize("lane", list(Lane))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_row_that_may_look_nowhere_gives_zeros(data: st.DataObject, lane: Lane) -> None:
    case = data.draw(paged_cases(True))
    out = compiled_kernels.paged_attention(*case[:6], 0.3, Nowhere(), True, lane)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("lane", list(Lane))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_nan_stays_with_its_row(data: st.DataObject, lane: Lane) -> None:
    case = data.draw(paged_cases(True))
    clean = compiled_kernels.paged_attention(*case[:6], 0.3, Causal(), True, lane)
    case[0][0] = torch.nan
    out = compiled_kernels.paged_attention(*case[:6], 0.3, Causal(), True, lane)
    assert out[0].isnan().all()
    assert torch.equal(out[1:], clean[1:])
