"""Custom masks, score functions and attention modules: from the names in an attention spec to callables."""

from __future__ import annotations

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
    Mask,
    Score,
    ScoreTemperature,
    SlidingWindow,
)
from workbench.custom import check_arity, load_custom, resolve_path
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec
from workbench.request import CustomPart


def build_mask(spec: AnyAttentionSpec) -> Mask:
    """Build the mask: the past, as far as the window and the custom mask show it."""
    chunk_size = spec.chunk_size if isinstance(spec, AttentionSpec) else None
    band: Mask = Causal() if chunk_size is None else Chunked(chunk_size)
    if spec.sliding_window is not None:
        band = SlidingWindow(spec.sliding_window, spec.num_sink_tokens)
    return band if spec.mask is None else AndMask(band, load_mask(spec.mask))


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
    return reduce(ChainedScore, parts) if parts else None


def load_mask(part: CustomPart) -> Mask:
    """Load the mask that `part` names. Raises WorkbenchError where it cannot be one."""
    return cast(Mask, _callable(part, "mask", 2, "(query, key)"))


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
    check_arity(made, count, name, shape)
    return made
