"""Custom masks, score functions and attention modules: from the names in an attention spec to callables."""

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
    """Build the mask: the past, as far as the window and the custom mask show it, for `num_heads` heads (all unless
    given) from `first_head` on."""
    chunk_size = spec.chunk_size if isinstance(spec, AttentionSpec) else None
    band: Mask = Causal() if chunk_size is None else Chunked(chunk_size)
    if spec.sliding_window is not None:
        band = SlidingWindow(spec.sliding_window, spec.num_sink_tokens)
    if spec.mask is None:
        return band
    return AndMask(band, load_mask(spec.mask, num_heads or spec.num_heads, first_head))


def build_score(spec: AnyAttentionSpec) -> Score | None:
    """Build the score function: the temperature, ALiBi, then the custom one; None for none of them."""
    temperature = spec.temperature if isinstance(spec, AttentionSpec) else None
    parts: list[Score] = []
    if temperature is not None:
        parts.append(ScoreTemperature(temperature.strength, temperature.floor, temperature.offset))
    if spec.position == "alibi":
        parts.append(ALiBi(spec.num_heads))
    if spec.score is not None:
        parts.append(load_score(spec.score))
        if spec.sink_logits and not is_normalized(parts[-1]):
            message = "gives weights that no sum divides (normalized = False), and sink logits are part of that sum"
            raise WorkbenchError(f"score {spec.score.path}: {message}; use it in layers without sink_logits")
    return reduce(ChainedScore, parts) if parts else None


def load_mask(part: CustomPart, heads: int, first_head: int = 0) -> Mask:
    """Load the mask that `part` names, of `heads` heads; its third parameter, if it is called `head`, is the head of
    the query. Raises WorkbenchError where it cannot be one."""
    made = _callable(part, "mask", 2, "(query, key) or (query, key, head)")
    return HeadMask(made, heads, first_head) if takes_head(made) else made


def load_score(part: CustomPart) -> Score:
    """Load the score function that `part` names. Raises WorkbenchError where it cannot be one."""
    return _callable(part, "score", 4, "(score, head, query, key)")


def load_pages(part: CustomPart) -> Any:
    """Load the choice of pages that `part` names: a function (query, *summaries) -> a term of a page's score, with the
    attributes `summaries` (names) and `keep` (pages), and if it has them `page_size` (tokens, 64) and `first` (pages,
    0).

    Raises WorkbenchError where it cannot be one.
    """
    made, name = load_custom(part), f"pages {part.path}"
    kinds, keep = getattr(made, "summaries", None), getattr(made, "keep", None)
    known = ", ".join(SUMMARIES)
    if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds or any(k not in SUMMARIES for k in kinds):
        raise WorkbenchError(f"{name}: summaries {kinds!r}; name what is kept of a page's keys: one or more of {known}")
    for label, value, least in (("keep", keep, 1), ("page_size", page_size_of(made), 1), ("first", _first(made), 0)):
        if not isinstance(value, int) or value < least:
            raise WorkbenchError(f"{name}: {label} {value!r}; it is a whole number of {least} or more")
    if not callable(made):
        raise WorkbenchError(f"{name}: not callable; it needs __call__(self, query, {', '.join(kinds)})")
    check_arity(made, 1 + len(kinds), name, f"(query, {', '.join(kinds)})")
    return made


def page_size_of(pages: Any) -> int:
    """Return the tokens of the pages among which a part chooses."""
    return getattr(pages, "page_size", DEFAULT_PAGE_SIZE)


def _first(pages: Any) -> int:
    return getattr(pages, "first", 0)


def build_selection(spec: AnyAttentionSpec) -> PageSelection | None:
    """Build the choice of pages; None where every page is read. Raises WorkbenchError, with the line of the user's
    file, for what is no arithmetic on numbers."""
    if not isinstance(spec, AttentionSpec) or spec.pages is None:
        return None
    made = load_pages(spec.pages)
    try:
        return page_selection(made, made.summaries, page_size_of(made), made.keep, _first(made))
    except Untraceable as error:
        raise WorkbenchError(f"pages {spec.pages.path}: {error}") from None


def page_summaries(spec: AnyAttentionSpec) -> PageSummaries | None:
    """Return what the cache keeps of each page's keys; None for nothing."""
    if not isinstance(spec, AttentionSpec) or spec.pages is None:
        return None
    made = load_pages(spec.pages)
    return PageSummaries(tuple(made.summaries), page_size_of(made))


def load_module(part: CustomPart) -> type[nn.Module]:
    """Load the attention module that `part` names. Raises WorkbenchError where it is no class of modules."""
    found = resolve_path(part.path)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise WorkbenchError(f"module {part.path}: is no module; extend workbench.model.layers.Attention")
    missing = [verb for verb in ("qkv_proj", "attend", "o_proj") if not callable(getattr(found, verb, None))]
    if missing:
        raise WorkbenchError(f"module {part.path}: has no {missing[0]}; extend workbench.model.layers.Attention")
    return found


def _callable(part: CustomPart, kind: str, count: int, shape: str) -> Any:
    made, name = load_custom(part), f"{kind} {part.path}"
    if not callable(made):
        raise WorkbenchError(f"{name}: not callable; it needs __call__(self, {shape[1:]}")
    if isinstance(made, nn.Module):
        raise WorkbenchError(f"{name}: is a torch module; what has parameters goes into an attention module (module:)")
    check_arity(made, count + (kind == "mask" and takes_head(made)), name, shape)
    return made


def takes_head(mask: Callable[..., Any]) -> bool:
    """Return whether a mask asks for the head of the query: whether its third parameter is called `head`."""
    try:
        names = list(inspect.signature(mask).parameters)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    return names[2:3] == ["head"]
