"""The specification: one span after another, each over its own context."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from compiled_kernels.masks import Mask
from compiled_kernels.scores import Score


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    mask: Mask,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    rule = scale, mask, softcap, sink_logits, score
    starts, lengths = span_starts.tolist(), context_lengths.tolist()
    for seq, context in enumerate(lengths):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        k, v = (gather_context(pages, page_table[seq], context) for pages in (keys, values))
        out[first:last] = attend(q[first:last], k, v, context - (last - first), *rule)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    scale: float,
    mask: Mask,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    """Attend with q [token, head, dim] at positions from `first_position` on, over k and v [context, kv_head, dim]."""
    weights = attention_weights(q, k, first_position, scale, mask, softcap, sink_logits, score)
    values = v.to(weights.dtype)
    mixed = einsum(weights, values, "group share token context, context group dim -> token group share dim")
    return rearrange(mixed, "token group share dim -> token (group share) dim").to(q.dtype)


def attention_weights(
    q: Tensor,
    k: Tensor,
    first_position: int,
    scale: float,
    mask: Mask,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    """Return the weight of each key for each query: [kv_head, queries_per_kv, token, context], in float32 or q's
    float64."""
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = rearrange(q.to(exact), "token (group share) dim -> group share token dim", group=k.shape[1])
    scores = (
        einsum(grouped, k.to(exact), "group share token dim, context group dim -> group share token context") * scale
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(first_position, first_position + q.shape[0], device=q.device)[:, None]
    positions = torch.arange(k.shape[0], device=q.device)[None]
    if score is not None:
        heads = torch.arange(q.shape[1], device=q.device).view(k.shape[1], -1, 1, 1)  # group share 1 1
        scores = score(scores, heads, queries, positions)
    scores = torch.where(mask(queries, positions), scores, -torch.inf)
    seen = (scores != -torch.inf).any(-1, keepdim=True)
    if sink_logits is not None:
        sink = rearrange(sink_logits.to(exact), "(group share) -> group share 1 1", group=k.shape[1])
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    # Nowhere to look is 0 / 0 in the softmax; a NaN that came in must stay one.
    return torch.where(seen, torch.softmax(scores, dim=-1)[..., : k.shape[0]], 0.0)


def gather_context(pages: Tensor, table: Tensor, context: int) -> Tensor:
    """Return the first `context` positions of one sequence, in order: [context, kv_head, dim]; zeros for
    freed pages."""
    size = pages.shape[2]
    held = table[: -(-context // size)].long()
    used = pages[held]
    used[held == 0] = 0  # a weight of 0 does not help against NaN
    return rearrange(used, "page group offset dim -> (page offset) group dim")[:context]
