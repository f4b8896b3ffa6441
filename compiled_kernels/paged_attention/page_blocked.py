"""Decode rows, one query each, written so that Inductor fuses the page lookup into the two reductions.

Nothing of the context is gathered: only the scores are materialised. The number of pages stays symbolic.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from compiled_kernels.masks import Mask
from compiled_kernels.scores import Score


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    scale: float,
    mask: Mask,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    """Attend with q [seq, head, dim] at the last position of each context."""
    seqs, heads, dim = q.shape
    groups, size = keys.shape[1], keys.shape[2]
    table = page_table.long()
    positions = torch.arange(table.shape[1] * size, device=q.device).view(1, -1, size)
    lengths = context_lengths.view(-1, 1, 1)
    allowed = mask(lengths - 1, positions) & (positions < lengths)  # [seq, page, offset]
    allowed = rearrange(allowed, "seq page offset -> seq page 1 1 offset")
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).view(seqs, 1, groups, heads // groups, 1, dim)
    scores = (grouped * keys[table].to(exact)[:, :, :, None]).sum(-1) * scale  # [seq, page, group, share, offset]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score is not None:
        head = torch.arange(heads, device=q.device).view(1, 1, groups, heads // groups, 1)
        scores = score(scores, head, (lengths - 1)[..., None, None], positions.view(1, -1, 1, 1, size))
    scores = torch.where(allowed, scores, -torch.inf)
    peak = scores.amax(dim=(1, 4), keepdim=True)
    if sink_logits is not None:
        sink = sink_logits.to(exact).view(1, 1, groups, heads // groups, 1)
        peak = torch.maximum(peak, sink)
    weights = torch.exp(scores - torch.where(peak.isfinite(), peak, 0.0))
    total = weights.sum(dim=(1, 4), keepdim=True)
    if sink_logits is not None:
        total = total + torch.exp(sink - peak)
    weights = weights / torch.where(total > 0, total, 1.0)
    # Unused offsets may hold anything: 0 x NaN is NaN, so they are chosen away rather than weighed away.
    weighed = weights[..., None] * values[table].to(exact)[:, :, :, None]
    mixed = torch.where(allowed[..., None], weighed, 0.0).sum(dim=(1, 4))  # [seq, group, share, dim]
    return mixed.view(seqs, heads, dim).to(q.dtype)
