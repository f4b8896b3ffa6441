"""Check laws of masks and score functions without a model: they depend only on heads and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.model.custom import takes_head
from workbench.testing.law import LawBroken

MAX_POSITION = 5000
CAUSAL_QUERIES = 256  # queries checked at once for visible later keys


@dataclass(frozen=True)
class PositionBlock:
    """A block of queries and keys by position: queries [first, first + queries), and `keys` keys, which end two
    positions after the last query.
    """

    first: int
    queries: int
    keys: int
    heads: int
    seed: int

    def __repr__(self) -> str:
        return f"queries {self.first} to {self.first + self.queries - 1}, {self.keys} keys up to the last"

    @property
    def query(self) -> Tensor:
        return torch.arange(self.first, self.first + self.queries)[:, None]

    @property
    def key(self) -> Tensor:
        end = self.first + self.queries + 2
        return torch.arange(max(0, end - self.keys), end)[None]

    @property
    def head(self) -> Tensor:
        return torch.arange(self.heads)[:, None, None]

    def scores(self) -> Tensor:
        shape = self.heads, self.queries, self.key.shape[1]
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))


def positions() -> st.SearchStrategy[PositionBlock]:
    first = st.one_of(st.integers(0, 20), st.integers(0, MAX_POSITION))
    return st.builds(
        PositionBlock, first, st.integers(1, 9), st.integers(1, 80), st.integers(1, 5), st.integers(0, 10_000)
    )


def _seen(mask: Any, query: Tensor, key: Tensor, block: PositionBlock) -> Tensor:
    """Call the mask, with the block's last head if it has that parameter, and return its result as booleans [query,
    key].
    """
    try:
        seen = mask(query, key, block.head[-1, 0, 0]) if takes_head(mask) else mask(query, key)
    except Exception as error:
        raise LawBroken(f"raised {type(error).__name__}: {error}, on {block}") from error
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise LawBroken(f"answered with {kind}, not with a tensor of booleans, on {block}")
    shape = torch.broadcast_shapes(query.shape, key.shape)
    try:
        return seen.expand(shape)
    except RuntimeError:
        raise LawBroken(f"answered with shape {tuple(seen.shape)} for {tuple(shape)}, on {block}") from None


def _mask_answers(mask: Any, block: PositionBlock) -> None:
    _seen(mask, block.query, block.key, block)


def _mask_is_causal(mask: Any, block: PositionBlock) -> None:
    # Far more pairs than in a drawn block, to find also a leak at one position in hundreds.
    queries = torch.arange(block.first, block.first + CAUSAL_QUERIES)[:, None]
    keys = torch.arange(block.first, block.first + 2 * CAUSAL_QUERIES)[None]
    ahead = (_seen(mask, queries, keys, block) & (keys > queries)).nonzero()
    if len(ahead):
        row, column = ahead[0].tolist()
        query, key = int(queries[row, 0]), int(keys[0, column])
        raise LawBroken(f"shows key {key} to query {query}; a mask must hide later keys itself: add `& (key <= query)`")


def _mask_is_of_positions(mask: Any, block: PositionBlock) -> None:
    whole = _seen(mask, block.query, block.key, block).clone()
    _repeats(whole, _seen(mask, block.query, block.key, block), block)
    for row, query in enumerate(block.query):
        alone = _seen(mask, query[:, None], block.key, block)[0]
        if not torch.equal(alone, whole[row]):
            raise LawBroken(f"answers for query {int(query)} depend on the other queries of the call, on {block}")
    half = (block.key.shape[1] + 1) // 2
    for part in (slice(0, half), slice(half - 1, None)):
        if not torch.equal(_seen(mask, block.query, block.key[:, part], block), whole[:, part]):
            raise LawBroken(f"answers depend on how many keys are asked for at once, on {block}")


def _scored(score: Any, scores: Tensor, head: Tensor, query: Tensor, key: Tensor, block: PositionBlock) -> Tensor:
    try:
        out = score(scores.clone(), head, query, key)
    except Exception as error:
        raise LawBroken(f"raised {type(error).__name__}: {error}, on {block}") from error
    if not isinstance(out, Tensor):
        raise LawBroken(f"answered with {type(out).__name__}, not with a tensor, on {block}")
    if out.shape != scores.shape or out.dtype != scores.dtype:
        given, right = f"{tuple(out.shape)} {out.dtype}", f"{tuple(scores.shape)} {scores.dtype}"
        raise LawBroken(f"answered with {given} for {right}, on {block}")
    return out


def _score_answers(score: Any, block: PositionBlock) -> None:
    for dtype in (torch.float32, torch.float64):
        past = (block.key <= block.query).expand(block.scores().shape)
        out = _scored(score, block.scores().to(dtype), block.head, block.query, block.key, block)[past]
        if bool(out.isnan().any()) or bool((out == torch.inf).any()):
            raise LawBroken(f"gave NaN or +inf for finite scores, on {block}")


def _score_keeps_input(score: Any, block: PositionBlock) -> None:
    scores = block.scores()
    score(scores, block.head, block.query, block.key)
    if not torch.equal(scores, block.scores()):
        raise LawBroken(f"changed its input in place, on {block}")


def _score_is_elementwise(score: Any, block: PositionBlock) -> None:
    """Check that each result depends only on one score, its head and its positions."""
    scores = block.scores()
    whole = _scored(score, scores, block.head, block.query, block.key, block)
    _repeats(whole, _scored(score, scores, block.head, block.query, block.key, block), block)
    other = scores.clone()
    other[..., 0] += 3.0  # change only the first key's score
    moved = _scored(score, other, block.head, block.query, block.key, block)
    if not _near(moved[..., 1:], whole[..., 1:]):
        raise LawBroken(f"the score of one key changes those of others, on {block}")
    for row, query in enumerate(block.query):
        alone = _scored(score, scores[:, row : row + 1], block.head, query[:, None], block.key, block)
        if not _near(alone[:, 0], whole[:, row]):
            raise LawBroken(f"scores of query {int(query)} depend on the other queries of the call, on {block}")
    one = _scored(score, scores[:1], block.head[:1], block.query, block.key, block)
    if not _near(one, whole[:1]):
        raise LawBroken(f"scores of head 0 depend on the other heads of the call, on {block}")


def _repeats(first: Tensor, again: Tensor, block: PositionBlock) -> None:
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        raise LawBroken(f"answered differently when asked again, on {block}")


def _near(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-5, atol=1e-5, equal_nan=True)


POSITION_LAWS: dict[str, dict[str, Callable[[Any, PositionBlock], None]]] = {
    "mask": {
        "answers with booleans that broadcast over positions": _mask_answers,
        "shows no key that comes after its query": _mask_is_causal,
        "is a function of positions alone": _mask_is_of_positions,
    },
    "score": {
        "gives scores of the same shape and type, never NaN or +inf": _score_answers,
        "leaves its input as it was": _score_keeps_input,
        "is a function of one score, its head and its positions": _score_is_elementwise,
    },
}
