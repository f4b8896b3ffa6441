"""Masks, score functions and choices of pages of a user's own."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.engine.page_bounds import Bounds  # noqa: F401 (named by path, as the next)
from tests.engine.tiny import even, farther  # noqa: F401


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
