"""Load the custom masks, score functions and attention modules of an attention spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from torch import nn

from compiled_kernels.masks import (
    ALiBi,
    AndMask,
    Causal,
    ChainedScore,
    Chunked,
    HeadMask,
    Mask,
    Score,
    ScoreTemperature,
    SlidingWindow,
    is_normalized,
)
from compiled_kernels.page_selection.selection import SUMMARIES, PageSelection, page_selection
from compiled_kernels.scalar_code.trace import Untraceable
from workbench.custom import check_arity, load_custom, resolve_path
from workbench.errors import WorkbenchError
from workbench.kv_cache.format import PageSummaries
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec
from workbench.request import CustomPart

DEFAULT_PAGE_SIZE = 64


def build_mask(spec: AnyAttentionSpec, first_head: int = 0, num_heads: int | None = None) -> Mask:
    """Build the mask of a layer's attention: it shows the earlier positions that the window and the custom mask allow.
    It is for `num_heads` heads (default: all) from `first_head` on.
    """
    chunk_size = spec.chunk_size if isinstance(spec, AttentionSpec) else None
    band: Mask = Causal() if chunk_size is None else Chunked(chunk_size)
    if spec.sliding_window is not None:
        band = SlidingWindow(spec.sliding_window, spec.num_sink_tokens)
    if spec.mask is None:
        return band
    return AndMask(band, load_mask(spec.mask, num_heads or spec.num_heads, first_head))


def build_score(spec: AnyAttentionSpec) -> Score | None:
    """Build the score function of a layer's attention: temperature, ALiBi, then the custom function; None if the layer
    has none of these.
    """
    temperature = spec.temperature if isinstance(spec, AttentionSpec) else None
    parts: list[Score] = []
    if temperature is not None:
        parts.append(ScoreTemperature(temperature.strength, temperature.floor, temperature.offset))
    if spec.position == "alibi":
        parts.append(ALiBi(spec.num_heads))
    if spec.score is not None:
        parts.append(load_score(spec.score))
        if spec.sink_logits and not is_normalized(parts[-1]):
            message = "does not divide weights by their sum (normalized = False), to which sink logits belong"
            raise WorkbenchError(f"score {spec.score.path}: {message}; use it in layers without sink_logits")
    return reduce(ChainedScore, parts) if parts else None


def load_mask(part: CustomPart, heads: int, first_head: int = 0) -> Mask:
    """Load the mask that `part` names, for `heads` heads; if it has a third parameter named `head`, it receives the
    query's head. Raises WorkbenchError if it is not a mask.
    """
    made = _callable(part, "mask", 2, "(query, key) or (query, key, head)")
    return HeadMask(made, heads, first_head) if takes_head(made) else made


def load_score(part: CustomPart) -> Score:
    """Load the score function that `part` names; raises WorkbenchError if it is not one."""
    return _callable(part, "score", 4, "(score, head, query, key)")


def load_pages(part: CustomPart) -> Any:
    """Load the page selection that `part` names: a function (query, *summaries) -> a term of a page's score, with the
    attributes `summaries` (names), `keep` (number of pages), and optionally `page_size` (tokens, default 64) and
    `first` (number of first pages that are always read, default 0).

    Raises WorkbenchError if it is not a page selection.
    """
    made, name = load_custom(part), f"pages {part.path}"
    kinds, keep = getattr(made, "summaries", None), getattr(made, "keep", None)
    known = ", ".join(SUMMARIES)
    if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds or any(k not in SUMMARIES for k in kinds):
        raise WorkbenchError(f"{name}: summaries {kinds!r}; name summaries of a page's keys: one or more of {known}")
    for label, value, least in (("keep", keep, 1), ("page_size", page_size_of(made), 1), ("first", _first(made), 0)):
        if not isinstance(value, int) or value < least:
            raise WorkbenchError(f"{name}: {label} {value!r}; must be a whole number, {least} or more")
    if not callable(made):
        raise WorkbenchError(f"{name}: not callable; it needs __call__(self, query, {', '.join(kinds)})")
    check_arity(made, 1 + len(kinds), name, f"(query, {', '.join(kinds)})")
    return made


def page_size_of(pages: Any) -> int:
    """Return the page size, in tokens, of a page selection."""
    return getattr(pages, "page_size", DEFAULT_PAGE_SIZE)


def _first(pages: Any) -> int:
    return getattr(pages, "first", 0)


def build_selection(spec: AnyAttentionSpec) -> PageSelection | None:
    """Build a layer's page selection; None if every page is read. Raises WorkbenchError, with the line of the user's
    file, for code that is not arithmetic on numbers.
    """
    if not isinstance(spec, AttentionSpec) or spec.pages is None:
        return None
    made = load_pages(spec.pages)
    try:
        return page_selection(made, made.summaries, page_size_of(made), made.keep, _first(made))
    except Untraceable as error:
        raise WorkbenchError(f"pages {spec.pages.path}: {error}") from None


def page_summaries(spec: AnyAttentionSpec) -> PageSummaries | None:
    """Return the summaries of each page's keys that the cache stores for a layer's page selection; None if there is
    none.
    """
    if not isinstance(spec, AttentionSpec) or spec.pages is None:
        return None
    made = load_pages(spec.pages)
    return PageSummaries(tuple(made.summaries), page_size_of(made))


def load_module(part: CustomPart) -> type[nn.Module]:
    """Load the attention module that `part` names; raises WorkbenchError if it is not a module class."""
    found = resolve_path(part.path)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise WorkbenchError(f"module {part.path}: is not a module; extend workbench.model.layers.Attention")
    missing = [verb for verb in ("qkv_proj", "attend", "o_proj") if not callable(getattr(found, verb, None))]
    if missing:
        raise WorkbenchError(f"module {part.path}: has no {missing[0]}; extend workbench.model.layers.Attention")
    return found


def _callable(part: CustomPart, kind: str, count: int, shape: str) -> Any:
    made, name = load_custom(part), f"{kind} {part.path}"
    if not callable(made):
        raise WorkbenchError(f"{name}: not callable; it needs __call__(self, {shape[1:]}")
    if isinstance(made, nn.Module):
        raise WorkbenchError(f"{name}: is a torch module; a part with parameters must be an attention module (module:)")
    check_arity(made, count + (kind == "mask" and takes_head(made)), name, shape)
    return made


def takes_head(mask: Callable[..., Any]) -> bool:
    """Return whether a mask depends on the query's head, i.e. has a third parameter named `head`."""
    try:
        names = list(inspect.signature(mask).parameters)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    return names[2:3] == ["head"]
