"""Masks and score functions as kernels take them: a window with sinks, and all else as traced programs.

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
    """Mask and score function as a kernel knows them.

    Attributes:
        sliding_window: positions that a query sees, all of the past where it is 0.
        num_sink_tokens: first positions that are always seen.
        mask: text of the program that gives of (query, key, head) whether the key is seen too; empty where all are.
        score: text of the program that gives of (score, head, query, key) what is put in the score's place.
        normalized: whether a softmax divides the weights; else a score is the logarithm of its weight.
    """

    sliding_window: int = 0
    num_sink_tokens: int = 0
    mask: str = ""
    score: str = ""
    normalized: bool = True

    def as_mask(self, heads: int) -> Mask:
        """Return the mask of that many heads."""
        band: Mask = SlidingWindow(self.sliding_window, self.num_sink_tokens) if self.sliding_window else Causal()
        return _joined(band, self.mask, heads) if self.mask else band

    @property
    def as_score(self) -> Score | None:
        return TracedScore(Program.parse(self.score), self.normalized) if self.score else None


@functools.lru_cache(maxsize=64)  # a step's layers get the same mask, and ask what it shows once
def _joined(band: Mask, program: str, heads: int) -> Mask:
    traced = TracedMask(Program.parse(program))
    return AndMask(band, HeadMask(traced.of_head, heads) if traced.program.uses("head") else traced)


@dataclass(frozen=True)
class TracedMask:
    """The mask that a program is."""

    program: Program

    def of_head(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        """Return what heads see; the three broadcast."""
        return self.program(query=query, key=key, head=head)

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.of_head(query, key, torch.zeros_like(query))  # the program asks for no head


@dataclass(frozen=True)
class TracedScore:
    """The score function that a program is."""

    program: Program
    normalized: bool = True

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.program(score=score, head=head, query=query, key=key)


def rules_of(mask: Mask, score: Score | None, operator: str, backend: str) -> AttentionRules:
    """Return mask and score function as a kernel takes them. Raises BackendError for what cannot be traced, with the
    line of the file that does it, and for masks that are joined with no causal one."""
    try:
        window, sinks, rest = _parts(mask)
        seen = "" if rest is None else _traced(_OfHeads(rest), MASK_INPUTS, "bool")
        scored = "" if score is None else _traced(score, SCORE_INPUTS, "float")
        return AttentionRules(window, sinks, seen, scored, is_normalized(score))
    except Untraceable as error:
        raise BackendError(f"{operator}: backend {backend}: {error}") from None


def known_rules(mask: Mask, score: Score | None) -> AttentionRules | None:
    """Return the rules where they can be traced, else None."""
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
    """Return window and sinks of a mask, and the mask of what else it hides."""
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
    """A mask as a function of heads too."""

    mask: Mask

    def __repr__(self) -> str:
        return describe_callable(self.mask)

    def __call__(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        return seen_by_head(self.mask, query, key, head)
