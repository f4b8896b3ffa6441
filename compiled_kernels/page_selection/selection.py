"""Define a page selection rule as data: the summaries that are stored of a page's keys, and how a query scores them.

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

# Summaries of a page's keys [..., offset, dim]: one number for each column.
SUMMARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda keys: keys.amin(-2),
    "max": lambda keys: keys.amax(-2),
    "mean": lambda keys: keys.mean(-2),
}


@dataclass(frozen=True)
class PageSelection:
    """The rule for the pages that a query reads: its own page, the first `first` pages, and the `keep` pages with the
    highest scores among the rest.

    The first pages are not ranked. Only full pages before the query's own are scored, so that the selection depends
    only on the text. All query heads of a key/value head read the same pages: a page's score is the highest score of
    these heads. Of equal scores the earlier page is kept.

    Attributes:
        page_size: tokens of a page.
        keep: pages kept by score.
        summaries: names of the stored summaries of each page's keys (see `SUMMARIES`).
        term: the program (see `scalar_code`) that computes one term of a page's score from a query's column and the
            page's summaries of that column; the score is the sum over columns.
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
    """Trace a function `term(query, *summaries)` of numbers, and return the selection rule that scores pages by it.
    Raises Untraceable, with the line in the file, for operations without a scalar form."""
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
    """Return a boolean for each score [token, group, page]: whether the page is read.

    Args:
        scores: the pages' scores [token, group, page]; the scores of the query's own page and of later pages are
            ignored.
        own: the number of each query's own page [token].
        selection: the selection rule.
    """
    page, own = torch.arange(scores.shape[-1], device=scores.device), own[:, None, None]
    first, before = page < selection.first, page < own
    ranked = torch.where(before & ~first, scores, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.zeros_like(ranked).scatter(-1, ranked, page.expand_as(ranked))
    return before & (first | (rank < selection.keep)) | (page == own)
