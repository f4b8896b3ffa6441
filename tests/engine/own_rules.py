"""Masks, score functions, choices of pages and filters of a user's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.engine.page_bounds import Bounds  # noqa: F401 (named by path, as the next)
from tests.engine.tiny import even, farther  # noqa: F401
from workbench.sampling.filters import History


def near_by_root(query: Tensor, key: Tensor) -> Tensor:
    """A root that hidden keys have, too: which pages show none is found from bounds."""
    return (key <= query) & ((query - key).float().sqrt() < 6)


def near_by_logarithm(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ~((query - key).float().log2() > 5.2)


def near_before(query: Tensor, key: Tensor) -> Tensor:
    """Of a page with the query's own position and later ones the root has no value at one end."""
    return (key <= query) & (((query - key).float() + 0.5).sqrt() < 3) | (key == 0)


def no_arithmetic(query: Tensor, key: Tensor) -> Tensor:
    """The past, by a running sum, of which no kernel has scalar code; torch.compile traces it."""
    return (key <= query) & (torch.cumsum(torch.ones_like(key), -1) > 0)


def untraceable(query: Tensor, key: Tensor) -> Tensor:
    """The past, by a branch on values."""
    if int(key.max()) < 0:
        raise ValueError("never")
    return key <= query


class Backwards:
    """A filter with a second stream, of the prompt backwards."""

    def second_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        return (*reversed(prompt_ids),)

    def __call__(self, logits: Tensor, histories: Sequence[History], second: Tensor) -> Tensor:
        return logits + second


BACKWARDS = {"filters": [{"path": f"{__name__}:Backwards"}]}
