"""Laws that do not come from our own specification: a reference that is wrong, though every backend agrees with it,
breaks them. Every backend is held to the specification by `test_agreement.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_kernels
from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.linear.quantize import quantize_int4, quantize_int8
from compiled_kernels.masks import Causal, SlidingWindow
from compiled_kernels.paged_attention import PagedKV
from tests.thorough import tries

seeds, few = st.integers(0, 2**31), st.integers(1, 6)
laws = settings(max_examples=tries(20))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@laws
@given(seeds, few, st.integers(1, 70), st.sampled_from([1e-6, 1e-5, 0.3]))
def test_rms_norm_is_torchs(seed: int, tokens: int, width: int, eps: float) -> None:
    x, weight = drawn(seed, tokens, width), drawn(seed + 1, width)
    expected = F.rms_norm(x, (width,), weight, eps)
    close(compiled_kernels.rms_norm(x, weight, eps), expected)
    total, normed = compiled_kernels.add_rms_norm(x - 1, torch.ones_like(x), weight, eps)
    close(total, x)
    close(normed, expected)


@pytest.mark.parametrize("x_type", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_type_of_x(x_type: torch.dtype, other: torch.dtype) -> None:
    x, residual = drawn(0, 3, 64).to(x_type), drawn(1, 3, 64).to(other)
    total, normed = compiled_kernels.add_rms_norm(x, residual, torch.ones(64), 1e-5)
    assert total.dtype == normed.dtype == x_type
    assert torch.equal(total, (x.double() + residual.double()).float().to(x_type)) or x_type == torch.float64


@laws
@given(seeds, few, st.integers(1, 70))
def test_the_gate_is_torchs_silu(seed: int, tokens: int, hidden: int) -> None:
    gate, up = drawn(seed, tokens, hidden), drawn(seed + 1, tokens, hidden)
    close(compiled_kernels.gated_silu(torch.cat([gate, up], dim=-1)), F.silu(gate) * up)


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return compiled_kernels.rotary(x, angles.cos(), angles.sin())


@laws
@given(seeds, few, st.sampled_from([2, 6, 64]), st.integers(0, 999), st.integers(0, 999))
def test_rotary_keeps_lengths_and_sees_distances_alone(seed: int, heads: int, dim: int, a: int, b: int) -> None:
    """Scores of a turned query and key depend on how far apart they stand, not where (Su et al., 2021, equation 16)."""
    q, k = drawn(seed, 1, heads, dim), drawn(seed + 1, 1, heads, dim)
    at, distance = torch.tensor([float(a)]), torch.tensor([float(b)])
    close(turned(q, at).norm(dim=-1), q.norm(dim=-1))
    close(turned(q, 0 * at), q)
    near = (turned(q, 0 * at) * turned(k, distance)).sum(-1)
    far = (turned(q, at) * turned(k, at + distance)).sum(-1)
    torch.testing.assert_close(near, far, rtol=1e-7, atol=1e-7)


def test_rotary_turns_halves_the_way_hugging_face_does() -> None:
    """x cos + rotate_half(x) sin, where rotate_half is (-second half, first half)."""
    x, angle = drawn(0, 3, 2, 8), drawn(1, 3, 4)
    cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (angle.cos(), angle.sin()))
    first, second = x.split(4, dim=-1)
    expected = x * cos + torch.cat([-second, first], dim=-1) * sin
    close(compiled_kernels.rotary(x, angle.cos(), angle.sin()), expected)


@laws
@given(seeds, few, st.integers(1, 90), st.booleans())
def test_products_are_torchs_on_the_numbers_that_are_stored(seed: int, tokens: int, out: int, with_bias: bool) -> None:
    """The numbers that INT8 and INT4 represent are computed here, by hand."""
    x, weight = drawn(seed, tokens, 64), drawn(seed + 1, out, 64)
    bias = drawn(seed + 2, out) if with_bias else None
    close(compiled_kernels.linear(x, weight, bias), F.linear(x, weight, bias))
    values, scales = quantize_int8(weight.float())
    dense = torch.stack([row.double() * float(scale) for row, scale in zip(values, scales, strict=True)])
    ours = compiled_kernels.linear_quantized(x, values, scales, None, bias)
    torch.testing.assert_close(ours, F.linear(x, dense, bias), rtol=1e-5, atol=1e-5)
    packed, steps = quantize_int4(weight.float(), group=16)
    dense = torch.zeros(out, 64, dtype=torch.float64)
    for column in range(64):
        row, place = divmod(column % 8, 4)
        codes = packed[:, column // 8].long() >> 4 * row + 8 * (0, 2, 1, 3)[place] & 15
        dense[:, column] = (codes - 8) * steps[:, column // 16].double()
    ours = compiled_kernels.linear_quantized(x, packed, steps, None, bias, "int4", 16)
    torch.testing.assert_close(ours, F.linear(x, dense, bias), rtol=1e-5, atol=1e-5)


@laws
@given(seeds, few, st.integers(1, 9), st.integers(1, 3), st.integers(1, 5))
def test_what_is_written_is_found_where_its_slot_says(seed: int, tokens: int, dim: int, groups: int, size: int) -> None:
    pages, rows = torch.full((7, groups, size, dim), torch.nan, dtype=torch.float64), drawn(seed, tokens, groups, dim)
    slots = torch.randperm(6 * size, generator=torch.Generator().manual_seed(seed))[:tokens] + size
    compiled_kernels.kv_write(pages, rows[: len(slots)], slots)
    flat = pages.transpose(1, 2).reshape(7 * size, groups, dim)  # a row a slot
    assert torch.equal(flat[slots], rows[: len(slots)])
    untouched = torch.ones(7 * size, dtype=torch.bool).index_fill(0, slots, False)
    assert flat[untouched].isnan().all()


@laws
@given(
    seeds, st.integers(1, 12), st.integers(0, 9), st.sampled_from([(1, 1), (2, 3)]), st.integers(1, 5),
    st.one_of(st.just(Causal()), st.builds(SlidingWindow, st.integers(1, 6), st.integers(0, 2))),
)  # fmt: skip
def test_attention_is_torchs(seed: int, span: int, before: int, heads: tuple, size: int, mask) -> None:
    """One span over pages in a random order beside scaled_dot_product_attention over plain keys and values."""
    (groups, share), dim, context = heads, 8, before + span
    q = drawn(seed, span, groups * share, dim)
    k, v = drawn(seed + 1, context, groups, dim), drawn(seed + 2, context, groups, dim)
    count = -(-context // size)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    pools = []
    for rows in (k, v):
        pages = torch.full((count + 1, groups, size, dim), torch.nan, dtype=torch.float64)
        for position in range(context):
            pages[table[position // size], :, position % size] = rows[position]
        pools.append(pages)
    allowed = torch.tensor([[_sees(mask, query, key) for key in range(context)] for query in range(before, context)])
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=allowed, scale=0.4,
        enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip
    (keys, values), starts, lengths = pools, torch.tensor([0, span]), torch.tensor([context])
    given_ = PagedKV(keys, values, table[None]), Spans(starts, lengths, span == 1)
    ours = compiled_kernels.paged_attention(q, *given_, AttentionParameters(0.4, mask))
    close(ours, expected)


def _sees(mask: Causal | SlidingWindow, query: int, key: int) -> bool:
    if isinstance(mask, Causal):
        return key <= query
    return key <= query and (query - key < mask.sliding_window or key < mask.num_sink_tokens)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_a_sink_is_a_key_whose_value_is_zero(softcap: float) -> None:
    """Written out for one query: caps, then one logit more that attends to nothing."""
    q, k, v, sink = drawn(0, 1, 1, 8), drawn(1, 1, 1, 5, 8), drawn(2, 1, 1, 5, 8), drawn(3, 1)
    scores = (k[0, 0] @ q[0, 0]) * 0.7
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = torch.cat([capped, sink]).softmax(0)[:-1]
    table, starts, lengths = torch.tensor([[1]]), torch.tensor([0, 1]), torch.tensor([5])
    keys, values = (torch.cat([torch.zeros_like(part), part]) for part in (k, v))  # the null page first
    given_ = PagedKV(keys, values, table), Spans(starts, lengths, True)
    ours = compiled_kernels.paged_attention(q, *given_, AttentionParameters(0.7, Causal(), softcap, sink))
    close(ours[0, 0], weights @ v[0, 0])


@laws
@given(seeds, few, st.integers(6, 300), st.integers(1, 6))
def test_log_probabilities_are_torchs(seed: int, samples: int, vocab: int, count: int) -> None:
    logits = 5 * drawn(seed, samples, vocab)
    expected = torch.log_softmax(logits, -1)
    close(compiled_kernels.log_softmax(logits), expected)
    values, ids = compiled_kernels.top_logprobs(logits, count)
    best = expected.topk(count, dim=-1)
    close(values, best.values)
    assert torch.equal(ids, best.indices)
