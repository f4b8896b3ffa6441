"""The specification: one span after another over the positions its queries read, quantized and residual, in one
softmax."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from compiled_kernels.masks import Mask
from compiled_kernels.quantized_attention.pages import QuantizationRule
from compiled_kernels.quantized_attention.quantize import QuantizedTensor, dequantize
from compiled_kernels.scores import Score


def reference(
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
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    out = torch.zeros_like(q)
    starts, lengths = span_starts.tolist(), context_lengths.tolist()
    for seq, context in enumerate(lengths):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        recent, packed = residual_keys, (keys, values)
        tables = quantized_table[seq], residual_table[seq]
        k, v, positions, is_packed = gather_context(
            packed, (recent, residual_values), tables, context, last - first, rule
        )
        queries = torch.arange(context - (last - first), context, device=q.device)[:, None]
        allowed = (
            mask(queries, positions) & (rule.is_quantized(queries, positions) == is_packed) & (positions <= queries)
        )
        seen = queries, positions, allowed
        out[first:last] = attend(q[first:last], k, v, *seen, scale, softcap, sink_logits, score)
    return out


def gather_context(
    packed: tuple[QuantizedTensor, QuantizedTensor],
    recent: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    context: int,
    span: int,
    rule: QuantizationRule,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the last `span` of `context` positions may read: keys and values [read, kv_head, dim], their
    positions, and whether they come from quantized pages. A position that only some queries read quantized comes
    twice."""
    size, exact = recent[0].shape[2], dtype or torch.promote_types(recent[0].dtype, torch.float32)
    settled = rule.quantized_until(context)
    unsettled = rule.quantized_until(context - span + 1)
    front = min(rule.num_sink_tokens, unsettled)
    positions = torch.cat([_positions(0, settled), _positions(0, front), _positions(unsettled, context)])
    is_packed = torch.arange(len(positions)) < settled
    runs = [(0, front), (unsettled, context)]
    found = []
    for pages, whole, transposed in ((packed[0], recent[0], True), (packed[1], recent[1], False)):
        parts = [_packed_run(pages, tables[0], settled, size, exact, transposed)]
        parts += [_recent_run(whole, tables[1], begin, end).to(exact) for begin, end in runs]
        found.append(torch.cat(parts))
    device = tables[0].device
    return found[0], found[1], positions.to(device), is_packed.to(device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    positions: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    """Attend with q [token, head, dim] at `queries` [token, 1] over k and v [read, kv_head, dim] at `positions`
    [read], where `allowed` [token, read]; a query that sees no key gives zeros."""
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = rearrange(q.to(exact), "token (group share) dim -> group share token dim", group=k.shape[1])
    scores = einsum(grouped, k.to(exact), "group share token dim, read group dim -> group share token read") * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score is not None:
        heads = torch.arange(q.shape[1], device=q.device).view(k.shape[1], -1, 1, 1)
        scores = score(scores, heads, queries, positions)
    scores = torch.where(allowed, scores, -torch.inf)
    somewhere = (scores != -torch.inf).any(-1, keepdim=True)
    if sink_logits is not None:
        sink = rearrange(sink_logits.to(exact), "(group share) -> group share 1 1", group=k.shape[1])
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.where(somewhere, torch.softmax(scores, dim=-1)[..., : k.shape[0]], 0.0)
    # What no query may see may be anything, and 0 x NaN is NaN.
    seen = torch.where(allowed.any(0)[:, None, None], v.to(exact), 0.0)
    mixed = einsum(weights, seen, "group share token read, read group dim -> token group share dim")
    return rearrange(mixed, "token group share dim -> token (group share) dim").to(q.dtype)


def _positions(begin: int, end: int) -> Tensor:
    return torch.arange(begin, max(begin, end))


def _packed_run(
    pages: QuantizedTensor, table: Tensor, end: int, size: int, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """Return the first `end` positions as numbers [position, kv_head, dim]."""
    used = table[: -(-end // size)].long()
    numbers = dequantize(pages.map(lambda part: part[used]), dtype)
    order = "page group dim offset" if transposed and pages.kind != "dense" else "page group offset dim"
    return rearrange(numbers, f"{order} -> (page offset) group dim")[:end]


def _recent_run(pages: Tensor, table: Tensor, begin: int, end: int) -> Tensor:
    """Return positions [begin, end) as they lie in full precision."""
    size = pages.shape[2]
    first = begin // size
    used = table[first : -(-end // size)].long()
    tokens = rearrange(pages[used], "page group offset dim -> (page offset) group dim")
    return tokens[begin - first * size :][: end - begin]
