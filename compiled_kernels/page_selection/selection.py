"""A choice of pages as data: what is kept of a page's keys, and how a query weighs it.

    Quest (Tang et al., 2024)            summaries min, max     score of a page: sum over columns of max(q min, q max)
    MoBA (Lu et al., 2025)               summary mean           score of a page: sum over columns of q mean
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.scalar_code.program import Kind, Program
from compiled_kernels.scalar_code.trace import traced_text

# Of the keys of a page [..., offset, dim]: one number a column.
SUMMARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda keys: keys.amin(-2),
    "max": lambda keys: keys.amax(-2),
    "mean": lambda keys: keys.mean(-2),
}


@dataclass(frozen=True)
class PageSelection:
    """The pages that a query reads: its own, the first `first`, and of the others the `keep` with the highest scores.

    The first pages are not ranked. Only pages that lie whole before the query's own are scored, so that the choice is a
    matter of the text alone. All query heads of a key/value head read the same pages: a page's score for them is the
    highest of theirs. Of equal scores the earlier page is kept.

    Attributes:
        page_size: tokens of a page.
        keep: pages kept by score.
        summaries: what is stored of each page's keys, by name (see `SUMMARIES`).
        term: the program (see `scalar_code`) that gives of a query's column and the page's summaries of that
            column a term of the page's score; the score is its sum over columns.
        first: first pages that are always read.
    """

    page_size: int
    keep: int
    summaries: tuple[str, ...]
    term: Program
    first: int = 0


def page_selection(
    term: Callable[..., Any], summaries: Sequence[str], page_size: int, keep: int, first: int = 0
) -> PageSelection:
    """Return the choice by a function `term(query, *summaries)` of numbers, traced. Raises Untraceable, with the line
    of the file, for what has no scalar form."""
    names = ("query", *summaries)
    inputs: tuple[tuple[str, Kind], ...] = tuple((name, "float") for name in names)
    return PageSelection(page_size, keep, tuple(summaries), Program.parse(traced_text(term, inputs, "float")), first)


def page_scores(q: Tensor, summaries: Sequence[Tensor], term: Program) -> Tensor:
    """Return the score of each page for each key/value head, float32 or float64: [token, group, page].

    Args:
        q: queries [token, head, dim].
        summaries: each [token or 1, page, group, dim].
        term: as in `PageSelection`.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    groups = summaries[0].shape[2]
    query = q.to(exact).unflatten(1, (groups, -1))[:, None]  # [token, 1, group, share, dim]
    given = {name: each.to(exact)[:, :, :, None] for (name, _), each in zip(term.inputs[1:], summaries, strict=True)}
    terms = term(query=query, **given)
    return terms.sum(-1).amax(-1).transpose(1, 2)


def choose(scores: Tensor, own: Tensor, selection: PageSelection) -> Tensor:
    """Return which pages are read, as booleans of the scores' shape.

    Args:
        scores: [token, group, page]; of the query's own page and later ones they may be anything.
        own: the number of each query's own page [token].
        selection: the choice.
    """
    page, own = torch.arange(scores.shape[-1], device=scores.device), own[:, None, None]
    first, before = page < selection.first, page < own
    ranked = torch.where(before & ~first, scores, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.zeros_like(ranked).scatter(-1, ranked, page.expand_as(ranked))
    return before & (first | (rank < selection.keep)) | (page == own)
