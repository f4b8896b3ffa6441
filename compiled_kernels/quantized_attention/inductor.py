"""Attention over quantized and residual pages as Inductor compiles it: decode rows as one function, longer spans by
torch's fused attention.

Decode rows are written so that Inductor fuses look-up, unpacking and scaling into the two reductions. Of the context
only the scores are materialised, and no number is ever stored wide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.quantized_attention.pages import QuantizationRule
from compiled_kernels.quantized_attention.quantize import QuantizedTensor, dequantize
from compiled_kernels.quantized_attention.reference import attend, gather_context, reference
from compiled_kernels.scores import ALiBi, Score
from compiled_kernels.torch_compile import compile_once


def decode_attention(
    q: Tensor,
    keys: QuantizedTensor,
    values: QuantizedTensor,
    residual_keys: Tensor,
    residual_values: Tensor,
    quantized_table: Tensor,
    residual_table: Tensor,
    context_lengths: Tensor,
    scale: float,
    mask: Mask,
    rule: QuantizationRule,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    """Return q [seq, head, dim] at the last position of each context."""
    seqs, heads, dim = q.shape
    groups, size = residual_keys.shape[1], residual_keys.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).view(seqs, 1, groups, heads // groups, 1, dim)
    lengths = context_lengths.long().view(-1, 1, 1)
    places = torch.arange(quantized_table.shape[1], device=q.device)[None].expand(seqs, -1)
    recent_places, recent_pages = _unsettled(residual_table, context_lengths.long(), size, rule)
    sources = [
        (_page(keys, quantized_table, exact, True), _page(values, quantized_table, exact, False), places, True),
        (residual_keys[recent_pages].to(exact), residual_values[recent_pages].to(exact), recent_places, False),
    ]
    blocks = []
    for k, v, at, is_packed in sources:
        positions = at[..., None] * size + torch.arange(size, device=q.device)  # [seq, page, offset]
        seen = (positions < lengths) & (rule.is_quantized(lengths - 1, positions) == is_packed)
        allowed = rearrange(seen & mask(lengths - 1, positions), "seq page offset -> seq page 1 1 offset")
        scores = (grouped * k[:, :, :, None]).sum(-1) * scale  # [seq, page, group, share, offset]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if score is not None:
            head = torch.arange(heads, device=q.device).view(1, 1, groups, heads // groups, 1)
            scores = score(scores, head, (lengths - 1)[..., None, None], positions[:, :, None, None])
        blocks.append((torch.where(allowed, scores, -torch.inf), allowed, v))
    sink = None if sink_logits is None else sink_logits.to(exact).view(1, 1, groups, heads // groups, 1)
    return _mixed(blocks, sink).reshape(seqs, heads, dim).to(q.dtype)


def _mixed(blocks: list[tuple[Tensor, Tensor, Tensor]], sink: Tensor | None) -> Tensor:
    """Return the softmax over all blocks' scores, times their values: [seq, group, share, dim]."""
    peak = torch.stack([scores.amax(dim=(1, 4), keepdim=True) for scores, _, _ in blocks]).amax(0)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = [torch.exp(scores - peak) for scores, _, _ in blocks]
    total = sum((each.sum(dim=(1, 4), keepdim=True) for each in weights), torch.zeros_like(peak))
    if sink is not None:
        total = total + torch.exp(sink - peak)
    total = torch.where(total > 0, total, torch.where(total == 0, 1.0, total))
    mixed = torch.zeros((), dtype=total.dtype, device=total.device)
    for each, (_, allowed, v) in zip(weights, blocks, strict=True):
        # Unused offsets may hold anything: 0 x NaN is NaN, so they are chosen away rather than weighed away.
        weighed = (each / total)[..., None] * v[:, :, :, None]
        mixed = mixed + torch.where(allowed[..., None], weighed, 0.0).sum(dim=(1, 4))
    return mixed


def _page(pages: QuantizedTensor, table: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Return whole pages by the table, as numbers [seq, page, group, offset, dim]."""
    used = table.long()
    numbers = dequantize(pages.map(lambda part: part[used]), dtype)
    return numbers.transpose(-1, -2) if transposed and pages.kind != "dense" else numbers


def _unsettled(table: Tensor, lengths: Tensor, size: int, rule: QuantizationRule) -> tuple[Tensor, Tensor]:
    """Return places [seq, few] of what is read in full precision, and the pages there: the residual end, and the first
    positions where those are kept. A place that would come twice, or lies beyond the table, reads as one past it."""
    begin = rule.quantized_until_each(lengths) // size
    places = begin[:, None] + torch.arange(rule.residual_pages(size), device=table.device)
    if rule.num_sink_tokens:
        front = torch.arange(-(-rule.num_sink_tokens // size), device=table.device)[None].expand(len(lengths), -1)
        front = torch.where(front < begin[:, None], front, table.shape[1])
        places = torch.cat([front, places], dim=1)
    beyond = places >= table.shape[1]
    pages = table.long().gather(1, torch.where(beyond, 0, places))
    # No context reaches a place past the table, so that what it is taken to hold is masked by its positions.
    return torch.where(beyond, table.shape[1], places), pages


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
        read = gather_context(
            (keys, values), (residual_keys, residual_values), tables, lengths[seq], span, rule, q.dtype
        )
        k, v, positions, is_packed = read
        queries = torch.arange(lengths[seq] - span, lengths[seq], device=q.device)[:, None]
        allowed = (
            mask(queries, positions) & (rule.is_quantized(queries, positions) == is_packed) & (positions <= queries)
        )
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
        keys, values = (
            QuantizedTensor(key_codes, key_scales, key_minima),
            QuantizedTensor(value_codes, value_scales, value_minima),
        )
        mask = SlidingWindow(window, sinks) if window else Causal()
        cache = keys, values, residual_keys, residual_values, quantized_table, residual_table, starts, lengths
        score = ALiBi(q.shape[1]) if alibi else None
        return form(q, *cache, scale, mask, QuantizationRule(group, lag, first), softcap, sink_logits, score)

    return run


eager_form = _unflattened(reference)
inductor_form = _unflattened(by_spans)
