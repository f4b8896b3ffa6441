"""Paged attention as Inductor compiles it: decode rows as one compiled function, longer spans by torch's fused
attention.

Decode rows, one query each, are written so that Inductor fuses the page lookup into the two reductions. Nothing of the
context is gathered: only the scores are materialised. The number of pages stays symbolic. In a mixed batch each longer
span is computed over its own context.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.paged_attention.reference import attend, gather_context, reference
from compiled_kernels.scores import ALiBi, Score
from compiled_kernels.torch_compile import compile_once


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


def by_spans(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    mask: Mask,
    softcap: float,
    sink_logits: Tensor | None,
    score: Score | None = None,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    rule = scale, mask, softcap, sink_logits, score
    starts, lengths = span_starts.tolist(), context_lengths.tolist()
    if starts[-1] < len(out):
        out[starts[-1] :] = 0
    first = next((i for i in range(len(lengths)) if starts[i + 1] - starts[i] != 1), len(lengths))
    if first:
        table, known = page_table[:first], context_lengths[:first]
        torch._dynamo.mark_dynamic(table, 1)
        run = compile_once(decode_attention, dynamic=True)
        out[:first] = run(q[:first], keys, values, table, known, *rule)
    plain = not softcap and sink_logits is None and score is None
    for seq in range(first, len(lengths)):
        start, end = starts[seq], starts[seq + 1]
        if start == end:
            continue
        k, v = (gather_context(pages, page_table[seq], lengths[seq]) for pages in (keys, values))
        before = lengths[seq] - (end - start)
        if plain:
            out[start:end] = _fused(q[start:end], k, v, before, scale, mask)
        else:
            out[start:end] = attend(q[start:end], k, v, before, *rule)
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, first_position: int, scale: float, mask: Mask) -> Tensor:
    """Attend with q [token, head, dim] over k and v [context, kv_head, dim] by torch's fused attention; every row sees
    at least itself."""
    share = q.shape[1] // k.shape[1]
    queries = rearrange(q, "token head dim -> 1 head token dim")
    k, v = (
        rearrange(part, "context group dim -> 1 group context dim").repeat_interleave(share, dim=1) for part in (k, v)
    )
    if first_position == 0 and isinstance(mask, Causal):
        mixed = F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale)
    else:
        at = torch.arange(first_position, first_position + q.shape[0], device=q.device)[:, None]
        allowed = mask(at, torch.arange(k.shape[2], device=q.device)[None])
        mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=allowed, scale=scale)
        if not bool(allowed.any(-1).all()):
            mixed = torch.where(allowed.any(-1)[:, None], mixed, 0.0)
    return rearrange(mixed, "1 head token dim -> token head dim")


def eager_form(
    q, keys, values, table, starts, lengths, scale, window, sinks, decode_only, softcap, sink_logits, alibi
) -> Tensor:
    """Run the specification as an operation that a graph may hold."""
    mask = SlidingWindow(window, sinks) if window else Causal()
    score = ALiBi(q.shape[1]) if alibi else None
    return reference(q, keys, values, table, starts, lengths, scale, mask, softcap, sink_logits, score)


def inductor_form(
    q, keys, values, table, starts, lengths, scale, window, sinks, decode_only, softcap, sink_logits, alibi
) -> Tensor:
    """Run `by_spans` as an operation that a graph may hold."""
    mask = SlidingWindow(window, sinks) if window else Causal()
    score = ALiBi(q.shape[1]) if alibi else None
    return by_spans(q, keys, values, table, starts, lengths, scale, mask, softcap, sink_logits, score)
