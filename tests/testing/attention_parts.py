"""Users' attention for the tests: right variants and, for each law, one that breaks it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from workbench.model.layers import Attention

TABLE = torch.tensor([[True, False, True], [True, True, False]])


@dataclass(frozen=True)
class Strided:
    """The query's own block of `width` and the first key of every earlier one."""

    width: int = 4

    def __call__(self, query, key):
        return (key <= query) & ((key // self.width == query // self.width) | (key % self.width == 0))


def blind_now_and_then(query, key):
    """Every third query sees nothing."""
    return (key <= query) & (query % 3 > 0)


def of_a_table(query, key):
    """A right mask with no scalar form: its table has two axes."""
    return (key <= query) & TABLE[query % 2, key % 3]


def bent(score, head, query, key, by: float = 0.1):
    return score - by * (head + 1) * (query - key).abs()


def hides_far(score, head, query, key):
    """Minus infinity hides keys, for each head others."""
    return torch.where(query - key > 3 * head + 2, -torch.inf, score)


class Gated(Attention):
    """A parameter of its own, and queries that carry something beside the heads."""

    def __init__(self, *slots, open: float = 0.5, **more):
        super().__init__(*slots, **more)
        self.gate = nn.Linear(self.spec.head_dim, 1)
        self.open = open

    def attend(self, q, batch, cache, backend=None):
        return super().attend(q, batch, cache, backend) * torch.sigmoid(self.gate(q) + self.open)


class Raises:
    def __call__(self, query, key):
        return {}["no such key"]


def numbers(query, key):
    return 1.0 * (key <= query)


def other_shape(query, key):
    return torch.ones(2, 3, 5, dtype=torch.bool)


def ahead(query, key):
    return key <= query + 1


def ahead_now_and_then(query, key):
    """One query in a hundred sees the next key."""
    return (key <= query) | ((key == query + 1) & (query % 100 == 99))


def of_the_span(query, key):
    """Counted from the first query at hand, not from the text's first."""
    return (key <= query) & (key >= query.min() - 3)


def of_the_keys(query, key):
    return (key <= query) & (key > key.max() - 7)


class Remembers:
    def __init__(self):
        self.calls = 0

    def __call__(self, query, key):
        self.calls += 1
        return (key <= query) & (key % 2 == self.calls % 2)


def gives_nan(score, head, query, key):
    return score.sqrt()


def half(score, head, query, key):
    return score.half()


def in_place(score, head, query, key):
    return score.mul_(2.0)


def sharpened(score, head, query, key):
    """Takes what stands beside it into account: future keys, other pages."""
    return score * (1 + score.mean(-1, keepdim=True))


def by_rank(score, head, query, key):
    return score - 0.5 * (query - query.min())


class LooksAhead(Attention):
    """Mixes each token with the next one of the batch, whosever that is."""

    def qkv_proj(self, x, cos, sin):
        return super().qkv_proj(x + 0.5 * x.roll(-1, dims=0), cos, sin)


class LooksAside(Attention):
    """Centres its input over the whole batch."""

    def qkv_proj(self, x, cos, sin):
        return super().qkv_proj(x - x.mean(0, keepdim=True), cos, sin)


class ByPlace(Attention):
    """Its answer depends on where the pages lie."""

    def attend(self, q, batch, cache, backend=None):
        place = batch.page_tables[0][:, :1].to(q.dtype).repeat_interleave(batch.span_starts.diff(), dim=0)
        return super().attend(q, batch, cache, backend) + 0.01 * place[:, :, None]


class Counts(Attention):
    """Its answer depends on how many tokens the step computes for a text."""

    def attend(self, q, batch, cache, backend=None):
        count = batch.span_starts.diff().repeat_interleave(batch.span_starts.diff()).to(q.dtype)
        return super().attend(q, batch, cache, backend) * count[:, None, None]


class KeepsAside(Attention):
    """Sums its queries up beside the cache, by a text's first page: right, until a text begins in the middle."""

    def __init__(self, *slots, **more):
        super().__init__(*slots, **more)
        self.sums = {}

    def attend(self, q, batch, cache, backend=None):
        firsts = batch.page_tables[0][:, 0].tolist() if batch.page_tables else [0]
        starts, ends, rows = batch.span_starts.tolist(), batch.context_lengths.tolist(), []
        for seq, (first, end) in enumerate(zip(firsts, ends, strict=False)):
            mine = q[starts[seq] : starts[seq + 1]]
            before = self.sums[first] if end > len(mine) else torch.zeros_like(mine[0])
            rows.append(before + mine.cumsum(0))
            self.sums[first] = rows[-1][-1].clone()
        return super().attend(q, batch, cache, backend) + 0.01 * torch.cat(rows)


class NotExtended(nn.Module):
    qkv_proj = attend = o_proj = nn.Module.forward

    def __init__(self, *slots):
        super().__init__()
