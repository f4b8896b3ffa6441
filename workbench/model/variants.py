"""Change the attention of a model: its spec, and the weights of its state to match."""

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
    """Change the attention of a trained model; return the changed spec and state. `state` itself is not modified.

    Fewer key/value heads are pooled from the existing ones; more are copies (which does not change results). New norms
    start as ones, sink logits at 0 (which adds one to the softmax's sum).

    Args:
        spec: the trained model.
        state: its parameters.
        composition: the change.

    Returns:
        The changed spec and state.

    Raises:
        WorkbenchError: for a change that is impossible for a trained model.
    """
    changed = change_spec(spec, composition)
    found = dict(state)
    for index, (old, new) in enumerate(zip(spec.layers, changed.layers, strict=True)):
        both = old.attention, new.attention
        found |= _layer(f"blocks.{index}.attention.", *both, state, composition.regroup, 1.0 - spec.norm.offset)
    return changed, {name: values for name, values in found.items() if not _dropped(name, changed)}


def change_spec(spec: ModelSpec, composition: AttentionConfig) -> ModelSpec:
    """Change the attention of a model's spec only, for weights that are drawn later."""
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
    """Return the last layer that caches its own keys and values; WorkbenchError if there is none."""
    for index in range(len(layers) - 1, -1, -1):
        if isinstance(layers[index].attention, AttentionSpec) and layers[index].attention.kv_shared_with is None:
            return index
    message = "kv_shared_with: previous: no layer before it has keys and values of its own"
    raise WorkbenchError(f"attention of layer {len(layers)}: {message}")


def pool_kv_heads(heads: Tensor, groups: int, pool: str = "mean_pool") -> Tensor:
    """Pool or copy key or value heads [kv_head, ...] to `groups` heads. Fewer heads: each is the mean of the heads that
    it replaces (Ainslie et al., 2023), or the `first` of them. More heads: they are copies.
    """
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
        # Field by field, so that conflicts between fields are reported.
        return type(attention).model_validate(dict(attention) | values)
    except ValidationError as error:
        raise explain(error, f"attention of layer {index}", type(attention)) from None


def _layer(at: str, old: AnyAttentionSpec, new: AnyAttentionSpec, state: StateDict, pool: str, one: float) -> StateDict:
    """Return the layer's changed and new parameters; a norm weight of `one` has no effect."""
    for slot in ("num_heads", "head_dim"):
        before, after = getattr(old, slot), getattr(new, slot)
        if before != after:
            message = f"{slot} {after} where the trained model has {before}"
            raise WorkbenchError(f"{at.rstrip('.')}: {message}; shape:NAME with random weights takes any")
    found: StateDict = {}
    if not (isinstance(old, AttentionSpec) and isinstance(new, AttentionSpec)):
        return found  # changes to latent attention affect no parameters
    if new.kv_shared_with is not None and old.kv_shared_with is None:
        rows = new.num_projected_heads * new.head_dim  # rows of queries, which come first
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
    """Return query, key and value rows [(head dim), ...] with changed key and value heads."""
    rows = rearrange(stacked, "(head dim) ... -> head dim ...", dim=old.head_dim)
    query, key, value = rows.split([old.num_heads, old.num_kv_heads, old.num_kv_heads])
    whole = torch.cat([query, change(key), change(value)])
    return rearrange(whole, "head dim ... -> (head dim) ...").contiguous()


def _dropped(name: str, spec: ModelSpec) -> bool:
    """Return whether a parameter belongs to a slot that its layer has lost."""
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
