"""A change of a model's attention: from (spec, state) to (spec, state)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange, reduce, repeat
from pydantic import ValidationError
from torch import Tensor

from workbench.errors import WorkbenchError, explain
from workbench.model.attention_config import FULL, AttentionChange, AttentionConfig
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec
from workbench.model.spec import LayerSpec, ModelSpec

StateDict = dict[str, Tensor]


def change_attention(spec: ModelSpec, state: StateDict, composition: AttentionConfig) -> tuple[ModelSpec, StateDict]:
    """Change the attention of a trained model (spec, state); `state` itself stays as it is.

    Fewer key/value heads are pooled from those there are, more are copies (which changes nothing); norms that are new
    begin as ones, sink logits at 0 (the softmax's sum plus one).

    Args:
        spec: the trained model.
        state: its parameters.
        composition: the change.

    Returns:
        The changed spec and state.

    Raises:
        WorkbenchError: for what a trained model cannot become.
    """
    changed = change_spec(spec, composition)
    found = dict(state)
    for index, (old, new) in enumerate(zip(spec.layers, changed.layers, strict=True)):
        both = old.attention, new.attention
        found |= _layer(f"blocks.{index}.attention.", *both, state, composition.regroup, 1.0 - spec.norm.offset)
    return changed, {name: values for name, values in found.items() if not _dropped(name, changed)}


def change_spec(spec: ModelSpec, composition: AttentionConfig) -> ModelSpec:
    """Change the architecture alone, for weights that are still to be drawn."""
    layers: list[LayerSpec] = []
    for kind, change in zip(spec.layers, composition.layer_changes(len(spec.layers)), strict=True):
        if change.kv_shared_with == "previous":
            change = change.model_copy(update={"kv_shared_with": _last_with_its_own(layers)})
        layers.append(kind.model_copy(update={"attention": _changed(kind.attention, change, len(layers))}))
    try:
        return ModelSpec.model_validate(dict(spec) | {"layers": tuple(layers)})
    except ValidationError as error:
        raise explain(error, "attention", ModelSpec) from None


def _last_with_its_own(layers: Sequence[LayerSpec]) -> int:
    """Return the last layer that caches keys and values of its own. Raises WorkbenchError where there is none."""
    for index in range(len(layers) - 1, -1, -1):
        if isinstance(layers[index].attention, AttentionSpec) and layers[index].attention.kv_shared_with is None:
            return index
    message = "kv_shared_with: previous: no layer before it has keys and values of its own"
    raise WorkbenchError(f"attention of layer {len(layers)}: {message}")


def pool_kv_heads(heads: Tensor, groups: int, pool: str = "mean_pool") -> Tensor:
    """Pool or copy key or value heads [kv_head, ...] to `groups` heads: each the mean of those it replaces (Ainslie et
    al., 2023), or the `first` of them; where there are more than before, copies."""
    before = heads.shape[0]
    if groups >= before:
        return repeat(heads, "group ... -> (group copies) ...", copies=groups // before)
    if pool == "first":
        return heads[:: before // groups]
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    return reduce(wide, "(group pooled) ... -> group ...", "mean", group=groups).to(heads.dtype)


def _changed(attention: AnyAttentionSpec, change: AttentionChange, index: int) -> AnyAttentionSpec:
    values = dict(change.given)
    heads = values.get("num_heads", attention.num_heads)
    if isinstance(values.get("num_kv_heads"), str):
        values["num_kv_heads"] = heads if values["num_kv_heads"] == "multi_head" else 1
    if values.get("sliding_window") == FULL:
        chunks = {"chunk_size": None} if isinstance(attention, AttentionSpec) and "chunk_size" not in values else {}
        values |= {"sliding_window": None, "num_sink_tokens": 0, **chunks}
    try:
        # Field by field, so that fields that exclude each other are reported.
        return type(attention).model_validate(dict(attention) | values)
    except ValidationError as error:
        raise explain(error, f"attention of layer {index}", type(attention)) from None


def _layer(at: str, old: AnyAttentionSpec, new: AnyAttentionSpec, state: StateDict, pool: str, one: float) -> StateDict:
    """Return the layer's parameters that change or are new; a norm's weight of `one` changes nothing."""
    for slot in ("num_heads", "head_dim"):
        before, after = getattr(old, slot), getattr(new, slot)
        if before != after:
            message = f"{slot} {after} where the trained model has {before}"
            raise WorkbenchError(f"{at.rstrip('.')}: {message}; shape:NAME with random weights takes any")
    found: StateDict = {}
    if not (isinstance(old, AttentionSpec) and isinstance(new, AttentionSpec)):
        return found  # what can change in latent attention has no parameters
    if new.kv_shared_with is not None and old.kv_shared_with is None:
        rows = new.num_projected_heads * new.head_dim  # of queries, which come first
        names = (f"{at}qkv.weight", f"{at}qkv.bias")
        found |= {name: state[name][:rows].clone() for name in names if name in state}
    elif new.num_kv_heads != old.num_kv_heads and new.kv_shared_with is None:
        if max(old.num_kv_heads, new.num_kv_heads) % min(old.num_kv_heads, new.num_kv_heads):
            message = f"{old.num_kv_heads} key/value heads cannot become {new.num_kv_heads}"
            raise WorkbenchError(f"{at.rstrip('.')}: {message}: one number must divide the other")
        for name in (f"{at}qkv.weight", f"{at}qkv.bias"):
            if name in state:
                found[name] = _regrouped(state[name], old, lambda part: pool_kv_heads(part, new.num_kv_heads, pool))
    like = state[f"{at}qkv.weight"]
    for name in ("query_norm", "key_norm"):
        size = new.qk_norm_parameters[name == "key_norm"]
        if new.qk_norm and not old.qk_norm and size:
            found[f"{at}{name}.weight"] = torch.full((size,), one, dtype=like.dtype, device=like.device)
    if new.sink_logits and not old.sink_logits:
        found[f"{at}sink_logits"] = torch.zeros(new.num_heads, dtype=like.dtype, device=like.device)
    return found


def _regrouped(stacked: Tensor, old: AttentionSpec, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return query, key and value rows [(head dim), ...] with their key and value heads changed."""
    rows = rearrange(stacked, "(head dim) ... -> head dim ...", dim=old.head_dim)
    query, key, value = rows.split([old.num_heads, old.num_kv_heads, old.num_kv_heads])
    whole = torch.cat([query, change(key), change(value)])
    return rearrange(whole, "head dim ... -> (head dim) ...").contiguous()


def _dropped(name: str, spec: ModelSpec) -> bool:
    """Return whether a parameter belongs to a slot that its layer no longer has."""
    if not name.startswith("blocks."):
        return False
    _, layer, *within = name.split(".")
    attention = spec.layers[int(layer)].attention
    if not isinstance(attention, AttentionSpec):
        return False
    if within == ["attention", "sink_logits"]:
        return not attention.sink_logits
    sizes = dict(zip(("query_norm", "key_norm"), attention.qk_norm_parameters, strict=True))
    return within[0] == "attention" and within[1] in sizes and not sizes[within[1]]
