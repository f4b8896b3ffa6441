"""Custom masks, score functions and attention modules: from the names in an attention spec to callables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

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
from workbench.custom import check_arity, load_custom, resolve_path
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec
from workbench.request import CustomPart


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
    return HeadMask(made, heads, first_head) if takes_head(made) else cast(Mask, made)


def load_score(part: CustomPart) -> Score:
    """Load the score function that `part` names. Raises WorkbenchError where it cannot be one."""
    return cast(Score, _callable(part, "score", 4, "(score, head, query, key)"))


def load_module(part: CustomPart) -> type[nn.Module]:
    """Load the attention module that `part` names. Raises WorkbenchError where it is no class of modules."""
    found = resolve_path(part.path)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise WorkbenchError(f"module {part.path}: is no module; extend workbench.model.layers.Attention")
    missing = [verb for verb in ("qkv_proj", "attend", "o_proj") if not callable(getattr(found, verb, None))]
    if missing:
        raise WorkbenchError(f"module {part.path}: has no {missing[0]}; extend workbench.model.layers.Attention")
    return found


def _callable(part: CustomPart, kind: str, count: int, shape: str) -> Callable[..., Any]:
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
