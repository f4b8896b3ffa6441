"""Mixed batches around compiled blocks: decodes together as one compiled function, each longer span by torch's fused
attention over what it reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from compiled_kernels.graphs import compile_once
from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.quantized_attention.packed import QuantizedTensor
from compiled_kernels.quantized_attention.page_blocked import decode_attention
from compiled_kernels.quantized_attention.reference import attend, gather_context, reference
from compiled_kernels.quantized_attention.rule import QuantizationRule
from compiled_kernels.scores import ALiBi, Score


def by_spans(
    q: Tensor,
    keys: QuantizedTensor,
    values: QuantizedTensor,
    residual_keys: Tensor,
    residual_values: Tensor,
    quantized_table: Tensor,
    residual_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    mask: Mask,
    rule: QuantizationRule,
    softcap: float,
    sink_logits: Tensor | None,
    score: Score | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    starts, lengths = span_starts.tolist(), context_lengths.tolist()
    first = next((i for i in range(len(lengths)) if starts[i + 1] - starts[i] != 1), len(lengths))
    pages = keys, values, residual_keys, residual_values
    if first:
        tables = quantized_table[:first], residual_table[:first]
        for table in tables:
            torch._dynamo.mark_dynamic(table, 1)
        run = compile_once(decode_attention, dynamic=True)
        rest = scale, mask, rule, softcap, sink_logits, score
        out[:first] = run(q[:first], *pages, *tables, context_lengths[:first], *rest)
    for seq in range(first, len(lengths)):
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start == rows.stop:
            continue
        span, tables = rows.stop - rows.start, (quantized_table[seq], residual_table[seq])
        read = gather_context((keys, values), (residual_keys, residual_values), tables, lengths[seq], span, rule, q.dtype)
        k, v, positions, is_packed = read
        queries = torch.arange(lengths[seq] - span, lengths[seq], device=q.device)[:, None]
        allowed = mask(queries, positions) & (rule.is_quantized(queries, positions) == is_packed) & (positions <= queries)
        if softcap or sink_logits is not None or score is not None:
            seen = queries, positions, allowed
            out[rows] = attend(q[rows], k, v, *seen, scale, softcap, sink_logits, score)
        else:
            out[rows] = _fused(q[rows], k, v, allowed, scale)
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Attend as `attend`, with scores that nothing changes."""
    share = q.shape[1] // k.shape[1]
    v = torch.where(allowed.any(0)[:, None, None], v, 0.0)
    k, v = (rearrange(part, "read group dim -> 1 group read dim").repeat_interleave(share, dim=1) for part in (k, v))
    queries = rearrange(q, "token head dim -> 1 head token dim")
    mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=allowed, scale=scale)
    mixed = torch.where(allowed.any(-1)[:, None], mixed, 0.0)
    return rearrange(mixed, "1 head token dim -> token head dim")


def _unflattened(form):
    """Wrap `form` as an operation that a graph may hold: tensors and numbers only."""

    def run(
        q, key_codes, key_scales, key_minima, value_codes, value_scales, value_minima, residual_keys, residual_values,
        quantized_table, residual_table, starts, lengths, group, lag, first, scale, window, sinks, decode_only, softcap,
        sink_logits, alibi,
    ):  # fmt: skip
        keys, values = QuantizedTensor(key_codes, key_scales, key_minima), QuantizedTensor(value_codes, value_scales, value_minima)
        mask = SlidingWindow(window, sinks) if window else Causal()
        cache = keys, values, residual_keys, residual_values, quantized_table, residual_table, starts, lengths
        score = ALiBi(q.shape[1]) if alibi else None
        return form(q, *cache, scale, mask, QuantizationRule(group, lag, first), softcap, sink_logits, score)

    return run


eager_form = _unflattened(reference)
inductor_form = _unflattened(by_spans)
