"""Masks and score functions as kernels take them: a window with sinks, and all else as traced programs.

    AndMask(SlidingWindow(64, 4), mine)   ->   window 64, sinks 4, mask: the program of `mine`
    ALiBi, a user's own function          ->   score: its program
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from compiled_kernels.backends import BackendError, describe_callable
from compiled_kernels.masks import AndMask, Causal, Chunked, Mask, Score, SlidingWindow
from compiled_kernels.scalar_code.program import Kind, Program
from compiled_kernels.scalar_code.trace import Untraceable, trace

MASK_INPUTS: tuple[tuple[str, Kind], ...] = (("query", "int"), ("key", "int"))
SCORE_INPUTS: tuple[tuple[str, Kind], ...] = (("score", "float"), ("head", "int"), *MASK_INPUTS)
MAX_PROGRAMS = 512


class AttentionRules(NamedTuple):
    """What a kernel knows of a mask and a score function.

    Attributes:
        window: positions that a query sees, all of the past where it is 0.
        sinks: first positions that are always seen.
        mask: text of the program that gives of (query, key) whether the key is seen too; empty where all are.
        score: text of the program that gives of (score, head, query, key) what is put in the score's place.
    """

    window: int = 0
    sinks: int = 0
    mask: str = ""
    score: str = ""

    @property
    def as_mask(self) -> Mask:
        band: Mask = SlidingWindow(self.window, self.sinks) if self.window else Causal()
        return AndMask(band, TracedMask(Program.parse(self.mask))) if self.mask else band

    @property
    def as_score(self) -> Score | None:
        return TracedScore(Program.parse(self.score)) if self.score else None


@dataclass(frozen=True)
class TracedMask:
    """The mask that a program is."""

    program: Program

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.program(query=query, key=key)


@dataclass(frozen=True)
class TracedScore:
    """The score function that a program is."""

    program: Program

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.program(score=score, head=head, query=query, key=key)


def rules_of(mask: Mask, score: Score | None, operator: str, backend: str) -> AttentionRules:
    """Return mask and score function as a kernel takes them. Raises BackendError for what cannot be traced, with the
    line of the file that does it, and for masks that are joined with no causal one."""
    try:
        window, sinks, rest = _parts(mask)
        seen = "" if rest is None else _traced(rest, MASK_INPUTS, "bool")
        return AttentionRules(window, sinks, seen, "" if score is None else _traced(score, SCORE_INPUTS, "float"))
    except Untraceable as error:
        raise BackendError(f"{operator}: backend {backend}: {error}") from None


def known_rules(mask: Mask, score: Score | None) -> AttentionRules | None:
    """Return the rules where they can be traced, else None."""
    try:
        return rules_of(mask, score, "", "")
    except BackendError:
        return None


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


_known: OrderedDict[Hashable, tuple[Any, str | Untraceable]] = OrderedDict()


def _traced(function: Callable[..., Tensor], inputs: tuple[tuple[str, Kind], ...], result: Kind) -> str:
    """Return the text of a function's program; equal functions are traced once, and kept."""
    if isinstance(function, TracedMask | TracedScore):
        return function.program.text
    try:
        key: Hashable = (hash(function), function)
    except TypeError:
        key = id(function)
    if key not in _known:
        try:
            found: str | Untraceable = trace(function, inputs, result).text
        except Untraceable as error:
            found = error
        _known[key] = function, found
        if len(_known) > MAX_PROGRAMS:
            _known.popitem(last=False)
    _, found = _known[key]
    if isinstance(found, Untraceable):
        raise found
    return found
