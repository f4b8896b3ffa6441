"""Masks and scores by themselves: what they show, how they are drawn, and ALiBi's slopes by the paper's own recipe."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels import Backend, BackendError, paged_attention
from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.masks import (
    ALiBi,
    AndMask,
    Causal,
    ChainedScore,
    Chunked,
    HeadMask,
    Mask,
    ScoreTemperature,
    SlidingWindow,
    differs_by_head,
    is_normalized,
    seen_by_head,
)
from compiled_kernels.paged_attention import PagedKV, unsupported_reason
from workbench.inspect.mask_picture import draw_mask

BANDS = st.one_of(st.just(Causal()), st.builds(SlidingWindow, st.integers(1, 9), st.integers(0, 4)))


def table(mask, tokens: int) -> torch.Tensor:
    at = torch.arange(tokens)
    return mask(at[:, None], at[None]).expand(tokens, tokens)


@given(BANDS, st.integers(1, 40), st.integers(1, 12))
def test_a_picture_fills_exactly_the_pairs_that_are_seen(mask, tokens: int, cell: int) -> None:
    """Read back from the drawing itself."""
    drawn = draw_mask(mask, tokens, cell)
    root = ElementTree.fromstring(drawn)
    paper, *boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert int(paper.get("width", "")) == tokens * cell
    filled = torch.zeros(tokens, tokens, dtype=torch.bool)
    for box in boxes:
        x, y, width = (int(box.get(name, "")) // cell for name in ("x", "y", "width"))
        filled[y, x : x + width] = True
    assert torch.equal(filled, table(mask, tokens))
    assert f"{int(filled.sum())} pairs seen" in drawn and drawn._repr_svg_() == drawn


HEADS = 4
BY_HEAD = st.builds(
    HeadMask, st.just(lambda query, key, head: (query - key) % HEADS == head % HEADS), st.just(HEADS), st.integers(0, 3)
)
LEAVES = BANDS | st.builds(Chunked, st.integers(1, 9)) | BY_HEAD
MASKS = st.recursive(LEAVES, lambda inner: st.builds(AndMask, inner, inner), max_leaves=4)


def plainly_seen(mask: Mask, query: int, key: int, head: int) -> bool:
    """Return whether one head's query sees a key, by the definition of each mask."""
    match mask:
        case AndMask(first, second):
            return plainly_seen(first, query, key, head) and plainly_seen(second, query, key, head)
        case HeadMask():
            return (query - key) % HEADS == (head + mask.first) % HEADS
        case SlidingWindow(window, sinks):
            return key <= query and (key > query - window or key < sinks)
        case Chunked(size):
            return key <= query and key // size == query // size
    return key <= query


def has_heads(mask: Mask) -> bool:
    return has_heads(mask.first) or has_heads(mask.second) if isinstance(mask, AndMask) else isinstance(mask, HeadMask)


@given(MASKS)
def test_a_composed_mask_shows_each_head_what_all_its_parts_show(mask: Mask) -> None:
    at, head = torch.arange(10), torch.arange(HEADS)
    found = seen_by_head(mask, at[:, None], at, head[:, None, None]).expand(HEADS, 10, 10)
    assert found.tolist() == [
        [[plainly_seen(mask, q, k, h) for k in range(10)] for q in range(10)] for h in range(HEADS)
    ]
    assert differs_by_head(mask) == has_heads(mask)
    assert not (found & ~table(mask, 10)).any(), "without a head it shows whatever any of them sees"


@given(st.integers(1, 9), st.integers(0, 9), st.floats(0.0, 2.0))
def test_scores_grow_from_the_first_floor_on(floor: int, offset: int, strength: float) -> None:
    query = torch.arange(30)
    found = ScoreTemperature(strength, floor, offset)(torch.ones(30, dtype=torch.float64), query, query, query)
    wanted = [1 + strength * math.log(1 + (q + offset) // floor) for q in range(30)]
    assert found.tolist() == pytest.approx(wanted)


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, not 0"):
        draw_mask(Causal(), 0)


def slopes(heads: int) -> list[float]:
    """The authors' code (github.com/ofirpress/attention_with_linear_biases), as it stands there."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    below = 2 ** math.floor(math.log2(heads))
    return of_power(below) + slopes(2 * below)[0::2][: heads - below]


@given(st.integers(1, 70))
def test_alibi_is_that_of_the_paper(heads: int) -> None:
    head, query, key = torch.arange(heads)[:, None, None], torch.tensor([[9]]), torch.arange(10)[None]
    out = ALiBi(heads)(torch.zeros(heads, 1, 10, dtype=torch.float64), head, query, key)
    expected = -torch.tensor(slopes(heads), dtype=torch.float64)[:, None] * torch.arange(9, -1, -1)
    assert torch.allclose(out[:, 0], expected, rtol=1e-6, atol=0)


def twice(score, head, query, key):
    return 2 * score


def test_then_is_one_after_the_other() -> None:
    score, head, query, key = torch.ones(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([[4]]), torch.tensor([[2]])
    first = ALiBi(1)(score, head, query, key)
    assert torch.equal(ChainedScore(ALiBi(1), twice)(score, head, query, key), 2 * first)
    assert torch.equal(ChainedScore(twice, ALiBi(1))(score, head, query, key), first + 1)


def weights(score, head, query, key):
    return score.relu()


weights.normalized = False  # type: ignore[attr-defined] (an attribute of a score, see `is_normalized`)


def test_the_last_score_decides_whether_a_softmax_divides() -> None:
    chains = [ChainedScore(first, second) for first in (twice, weights) for second in (twice, weights)]
    assert [is_normalized(each) for each in (None, twice, weights, *chains)] == [True, True, False, *[True, False] * 2]


def ranked(query, key):
    return key.argsort() >= 0


def summed(score, head, query, key):
    return score - score.mean()


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.MLIR])
def test_a_backend_refuses_what_is_no_arithmetic_on_positions_with_its_line(backend: Backend) -> None:
    own = AndMask(Causal(), ranked)
    for mask, score, message in ((own, None, "key.argsort"), (Causal(), summed, "score.mean")):
        reason = unsupported_reason(backend, mask, score)
        assert reason is not None and message in reason and str(backend) in reason and "test_masks.py:" in reason
        pages, table = torch.zeros(2, 1, 4, 2), torch.ones(1, 2, dtype=torch.int32)
        given = PagedKV(pages, pages, table), Spans(torch.tensor([0, 1]), torch.tensor([1]), True)
        with pytest.raises(BackendError, match=message):
            paged_attention(torch.zeros(1, 1, 2), *given, AttentionParameters(1.0, mask, score=score), backend)
    assert unsupported_reason(backend, AndMask(Causal(), SlidingWindow(3, 1)), twice) is None
    assert unsupported_reason(Backend.INDUCTOR, own, summed) is None
