"""Attention masks: predicates over positions that broadcast, True where the query sees the key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from compiled_kernels.backends import BackendError, describe_callable
from compiled_kernels.pictures import MaskPicture, draw_mask

__all__ = ["Both", "Causal", "Mask", "Picture", "SlidingWindow", "band", "picture"]

# Given query and key positions that broadcast: True where the query may look.
Mask = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Causal:
    """Every position up to the query's own."""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query


@dataclass(frozen=True)
class SlidingWindow:
    """The last `window` positions, the query's own included (Mistral, Beltagy et al. 2020), and the first
    `sinks` positions of the text (StreamingLLM, Xiao et al. 2023)."""

    window: int
    sinks: int = 0

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((key > query - self.window) | (key < self.sinks))


@dataclass(frozen=True)
class AndMask:
    """The keys that both masks show."""

    first: Mask
    second: Mask

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.first(query, key) & self.second(query, key)

    def __repr__(self) -> str:
        return f"Both({describe_callable(self.first)}, {describe_callable(self.second)})"


def window_and_sinks(mask: Mask, backend: str) -> tuple[int, int]:
    """Return (window, sinks) of a mask, 0 for no window: the form in which operations known to torch by a schema take
    masks.

    Raises BackendError for any other predicate: the backend cannot carry it out.
    """
    if isinstance(mask, Causal):
        return 0, 0
    if isinstance(mask, SlidingWindow):
        return mask.window, mask.sinks
    raise BackendError(f"paged_attention: backend {backend} knows causal masks with window and sinks, not {describe_callable(mask)}")
