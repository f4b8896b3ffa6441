"""Decode rows over packed and residual pages, written so that Inductor fuses look-up, unpacking and scaling into the
two reductions: of the context only the scores are materialised, and no number is ever stored wide."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from compiled_kernels.masks import Mask
from compiled_kernels.quantized_attention.packed import QuantizedTensor, dequantize
from compiled_kernels.quantized_attention.rule import QuantizationRule
from compiled_kernels.scores import Score


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
