"""Convert masks and score functions to the form that kernels read: a window with sinks, and programs traced from the
functions.

    AndMask(SlidingWindow(64, 4), mine)   ->   window 64, sinks 4, mask: the program of `mine`
    ALiBi, a user's own function          ->   score: its program
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError, describe_callable
from compiled_kernels.masks import (
    AndMask,
    Causal,
    Chunked,
    HeadMask,
    Mask,
    Score,
    SlidingWindow,
    is_normalized,
    seen_by_head,
)
from compiled_kernels.scalar_code.program import Kind, Program
from compiled_kernels.scalar_code.trace import Untraceable, traced_text

MASK_INPUTS: tuple[tuple[str, Kind], ...] = (("query", "int"), ("key", "int"), ("head", "int"))
SCORE_INPUTS: tuple[tuple[str, Kind], ...] = (("score", "float"), ("head", "int"), ("query", "int"), ("key", "int"))


class AttentionRules(NamedTuple):
    """A mask and a score function in the form that kernels read.

    Attributes:
        sliding_window: number of positions that a query sees; 0: all earlier ones.
        num_sink_tokens: number of first positions that are always visible.
        mask: text of the program (query, key, head) -> whether the key is visible, in addition to the window; empty if
            all are.
        score: text of the program (score, head, query, key) -> new score.
        normalized: whether a softmax normalizes the weights; otherwise a score is the logarithm of its weight.
    """

    sliding_window: int = 0
    num_sink_tokens: int = 0
    mask: str = ""
    score: str = ""
    normalized: bool = True

    def as_mask(self, heads: int) -> Mask:
        """Return these rules as a mask for a layer with `heads` heads."""
        band: Mask = SlidingWindow(self.sliding_window, self.num_sink_tokens) if self.sliding_window else Causal()
        return _joined(band, self.mask, heads) if self.mask else band

    @property
    def as_score(self) -> Score | None:
        return TracedScore(Program.parse(self.score), self.normalized) if self.score else None


@functools.lru_cache(maxsize=64)  # layers of a step share the mask object: it is evaluated once
def _joined(band: Mask, program: str, heads: int) -> Mask:
    traced = TracedMask(Program.parse(program))
    return AndMask(band, HeadMask(traced.of_head, heads) if traced.program.uses("head") else traced)


@dataclass(frozen=True)
class TracedMask:
    """A mask computed by a program."""

    program: Program

    def of_head(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        """Return a boolean for each query, key and head: whether the head sees the key; the three arguments
        broadcast.
        """
        return self.program(query=query, key=key, head=head)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.of_head(query, key, torch.zeros_like(query))  # the program does not depend on the head


@dataclass(frozen=True)
class TracedScore:
    """A score function computed by a program."""

    program: Program
    normalized: bool = True

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.program(score=score, head=head, query=query, key=key)


def rules_of(mask: Mask, score: Score | None, operator: str, backend: str) -> AttentionRules:
    """Return mask and score function in the form that kernels read. Raises BackendError for code that cannot be traced,
    with its file and line, and for masks that are not combined with a causal mask.
    """
    try:
        window, sinks, rest = _parts(mask)
        seen = "" if rest is None else _traced(_OfHeads(rest), MASK_INPUTS, "bool")
        scored = "" if score is None else _traced(score, SCORE_INPUTS, "float")
        return AttentionRules(window, sinks, seen, scored, is_normalized(score))
    except Untraceable as error:
        raise BackendError(f"{operator}: backend {backend}: {error}") from None


def known_rules(mask: Mask, score: Score | None) -> AttentionRules | None:
    """Return mask and score function in the form that kernels read; None if they cannot be traced."""
    try:
        return rules_of(mask, score, "", "")
    except BackendError:
        return None


def _traced(function: Callable[..., Tensor], inputs: tuple[tuple[str, Kind], ...], result: Kind) -> str:
    """Return the text of a function's program."""
    if isinstance(function, TracedScore):
        return function.program.text
    if isinstance(function, _OfHeads) and isinstance(function.mask, TracedMask):
        return function.mask.program.text
    return traced_text(function, inputs, result)


def _parts(mask: Mask) -> tuple[int, int, Mask | None]:
    """Return window and sinks of a mask, and the remaining mask."""
    if isinstance(mask, Causal):
        return 0, 0, None
    if isinstance(mask, SlidingWindow):
        return mask.sliding_window, mask.num_sink_tokens, None
    if isinstance(mask, Chunked):
        return 0, 0, mask
    if not isinstance(mask, AndMask):
        raise Untraceable(f"{describe_callable(mask)} may show the future; join it with Causal() by AndMask")
    window, sinks, rest = _parts(mask.first)
    return window, sinks, mask.second if rest is None else AndMask(rest, mask.second)


@dataclass(frozen=True)
class _OfHeads:
    """A mask as a function of query, key and head."""

    mask: Mask

    def __repr__(self) -> str:
        return describe_callable(self.mask)

    def __call__(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        return seen_by_head(self.mask, query, key, head)
