"""Compute attention over pages for Inductor: decode rows as one compiled function, longer spans by torch's fused
attention.

Decode rows, one query each, are written so that Inductor fuses the page lookup (and the unpacking of codes) into the
two reductions. No copy of the context is made: only the scores are stored in memory. The number of pages stays
symbolic. In a mixed batch each longer span is computed over its own context.

A user's mask is evaluated once a step, before the graph runs. Inside the graph's loops it would be evaluated for every
head and column.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, KVPages, SpanContext, Spans, attend
from compiled_kernels.masks import CAUSAL, Causal, Mask, SlidingWindow, differs_by_head, is_normalized, seen_by_head
from compiled_kernels.torch_compile import compile_once


def decode_attention(
    q: Tensor,
    kv: KVPages,
    context_lengths: Tensor,
    parameters: AttentionParameters,
    seen: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Compute attention of one query per sequence, q [seq, head, dim], at the last position of each context. The
    queries read the keys that the mask shows; `seen`, if given, is that result: a boolean [seq, page, offset] for each
    block."""
    scale, mask, softcap, sink_logits, score, *_ = parameters
    (seqs, heads, dim), exact = q.shape, torch.promote_types(q.dtype, torch.float32)
    lengths, scored = context_lengths.view(-1, 1, 1), []
    for block, (k, v, positions, readable) in enumerate(kv.blocks(lengths, exact)):
        groups = k.shape[2]
        head = torch.arange(heads, device=q.device).view(1, 1, groups, heads // groups, 1)
        query, key = (lengths - 1)[..., None, None], positions[:, :, None, None]  # [seq, page, group, share, offset]
        if seen is None:
            allowed = seen_by_head(mask, query, key, head) & readable[:, :, None, None]
        else:
            allowed = seen[block][:, :, None, None]
        if kv.chosen is not None:
            allowed = allowed & rearrange(kv.chosen, "seq group page -> seq page group 1 1")
        grouped = q.to(exact).view(seqs, 1, groups, heads // groups, 1, dim)
        scores = (grouped * k[:, :, :, None]).sum(-1) * scale  # [seq, page, group, share, offset]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if score is not None:
            scores = score(scores, head, query, key)
        scored.append((torch.where(allowed, scores, -torch.inf), allowed, v))
    if not is_normalized(score):
        return _summed([(torch.exp(scores), allowed, v) for scores, allowed, v in scored]).view_as(q).to(q.dtype)
    peak = functools.reduce(torch.maximum, [scores.amax(dim=(1, 4), keepdim=True) for scores, _, _ in scored])
    sink = None if sink_logits is None else sink_logits.to(exact).view(1, 1, *peak.shape[2:4], 1)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    weights = [torch.exp(scores - torch.where(peak.isfinite(), peak, 0.0)) for scores, _, _ in scored]
    total = functools.reduce(operator.add, [each.sum(dim=(1, 4), keepdim=True) for each in weights])
    if sink is not None:
        total = total + torch.exp(sink - peak)
    divisor = torch.where(total > 0, total, 1.0)
    shares = [(each / divisor, allowed, v) for each, (_, allowed, v) in zip(weights, scored, strict=True)]
    return _summed(shares).view(seqs, heads, dim).to(q.dtype)


def _summed(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return the values, weighed: [seq, group, share, dim], of weights [seq, page, group, share, offset], which of them
    are allowed, and values [seq, page, group, offset, dim]."""
    mixed = []
    for weights, allowed, v in parts:
        # Unused offsets may hold anything: 0 x NaN is NaN, so they are chosen away rather than weighed away.
        weighed = weights[..., None] * v[:, :, :, None]
        mixed.append(torch.where(allowed[..., None], weighed, 0.0).sum(dim=(1, 4)))
    return functools.reduce(operator.add, mixed)


class ShownKeys(NamedTuple):
    """The pages with keys that the last position of each context sees [seq, kept page], the indices of these pages in
    the page table, and for each block of `with_pages` whether the position sees each key [seq, page, offset]. `keys` is
    None if heads differ, and for a window, which the loops of decode attention check themselves."""

    pages: Tensor
    places: Tensor
    keys: tuple[Tensor, ...] | None


class _Remembered(NamedTuple):
    """The last result of `shown_keys`, because the layers of a step ask for the same result one after another."""

    mask: Mask
    layout: tuple[Any, ...]
    key_tensors: tuple[Tensor, ...]
    answer: ShownKeys

    def matches(self, mask: Mask, layout: tuple[Any, ...], key_tensors: tuple[Tensor, ...]) -> bool:
        """Return whether the result was computed for the same mask and for equal tables and lengths."""
        own = self.key_tensors
        alike = self.mask == mask and self.layout == layout and len(own) == len(key_tensors)
        return alike and own[0].device == key_tensors[0].device and all(map(torch.equal, own, key_tensors))


_remembered: _Remembered | None = None


def shown_keys(kv: KVPages, lengths: Tensor, mask: Mask, remember: bool = False) -> ShownKeys:
    """Return the selected pages with a key that `mask` shows to the last position of each context, and booleans for
    their keys. Rows with fewer pages are padded with the null page, in a place that no context reaches. With
    `remember`, which requires that the mask never changes, the last result is returned again for equal arguments."""
    global _remembered
    key_tensors, last, differs = (lengths, *kv.tables), _remembered, kv.chosen is not None or differs_by_head(mask)
    if remember and not differs and last is not None and last.matches(mask, kv.layout, key_tensors):
        return last.answer
    table = kv.tables[0]
    held = table.shape[1]
    window = isinstance(mask, SlidingWindow)
    # a window is a few comparisons and needs no graph
    find = _pages_seen if window else compile_once(_pages_seen, dynamic=True)
    seen = find(lengths, mask, held, kv.layout[0])
    seen = seen if kv.chosen is None else seen & kv.chosen.any(1)
    most = max(2, int(seen.sum(1).max()))  # two at the least: of one, torch.compile would make a special case
    places = (~seen).byte().argsort(dim=1, stable=True)[:, :most]
    seen, pages = seen.gather(1, places), table.gather(1, places)
    answer = ShownKeys(torch.where(seen, pages, 0), torch.where(seen, places, held), None)
    if differs:
        return answer
    if not window:
        keys = compile_once(_keys_seen, dynamic=True)(kv.with_pages(answer.pages, answer.places), lengths, mask)
        answer = answer._replace(keys=keys)
    if remember:
        _remembered = _Remembered(mask, kv.layout, tuple(each.clone() for each in key_tensors), answer)
    return answer


def _pages_seen(lengths: Tensor, mask: Mask, held: int, size: int) -> Tensor:
    """Return whether each of `held` pages has a key that the last position of each context sees: [seq, page]."""
    positions = torch.arange(held * size, device=lengths.device).view(1, held, size)
    seen = mask((lengths - 1).long().view(-1, 1, 1), positions) & (positions < lengths.view(-1, 1, 1))
    return seen.any(-1)


def _keys_seen(kv: KVPages, lengths: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    """Return whether the last position of each context sees each key of each block: [seq, page, offset]."""
    lengths = lengths.long().view(-1, 1, 1)
    return tuple(
        mask(lengths - 1, positions) & readable for _, _, positions, readable in kv.blocks(lengths, torch.float32)
    )


def by_spans(q: Tensor, kv: KVPages, spans: Spans, parameters: AttentionParameters) -> Tensor:
    """Compute attention of all decodes, which come first, in one compiled function, and of each longer span
    separately.
    """
    decodes, longer = spans.decodes_and_longer()
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if decodes:
        # Copies, because torch would compile views again, depending on whether a view covers its whole base.
        first, queries, lengths = kv.first(decodes), q[:decodes].clone(), spans.context_lengths[:decodes].clone()
        seen, decode_parameters = None, parameters
        if kv.chosen is not None or not isinstance(parameters.mask, Causal):
            # A mask of known rules is one object for all layers, and a value.
            known = parameters.rules is not None
            mask = parameters.rules.as_mask(q.shape[1]) if parameters.rules else parameters.mask
            pages, places, seen = shown_keys(first, lengths, mask, remember=known)
            first = first.with_pages(pages, places)
            if seen is not None:  # one graph for all masks
                decode_parameters = parameters._replace(mask=CAUSAL, rules=None)
        for table in first.tables:
            torch._dynamo.mark_dynamic(table, 1)
        run = compile_once(decode_attention, dynamic=True)
        out[:decodes] = run(queries, first, lengths, decode_parameters, seen)
    mask, score, softcap = parameters.mask, parameters.score, parameters.softcap
    changed = softcap or parameters.sink_logits is not None or score is not None
    changed = changed or differs_by_head(mask) or kv.chosen is not None
    for seq, rows, context in longer:
        read = kv.gather(seq, context, rows, q.dtype, mask)
        out[rows] = (attend if changed or read.k.dtype != q.dtype else _fused)(q[rows], read, parameters)
    return out


def _fused(q: Tensor, context: SpanContext, parameters: AttentionParameters) -> Tensor:
    """Compute `attend` by torch's fused attention, for scores without changes."""
    k, v, mask, causal = context.k, context.v, parameters.mask, isinstance(parameters.mask, Causal)
    queries = rearrange(q, "token head dim -> 1 head token dim")
    allowed = None if causal and len(q) == len(k) else context.allowed(mask)
    if allowed is not None and context.readable is not None:
        read = allowed.any(0)[:, None, None]  # keys that no query reads may hold NaN, and masks are added to scores
        k, v = torch.where(read, k, 0.0), torch.where(read, v, 0.0)
    share = q.shape[1] // k.shape[1]
    k, v = (rearrange(part, "read group dim -> 1 group read dim").repeat_interleave(share, dim=1) for part in (k, v))
    mixed = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=allowed, is_causal=allowed is None, scale=parameters.scale
    )
    if allowed is not None and not bool(allowed.any(-1).all()):
        mixed = torch.where(allowed.any(-1)[:, None], mixed, 0.0)
    return rearrange(mixed, "1 head token dim -> token head dim")
