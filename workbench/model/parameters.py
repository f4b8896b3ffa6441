"""Parameters: their names, their shapes, and the Hugging Face tensors each is stacked from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from workbench.model.spec import AttentionSpec, LayerSpec, MLASpec, ModelSpec


@dataclass(frozen=True)
class AxisLayout:
    """The order of a stored tensor's axes and of ours: two sides of an einops pattern, which can be read either way."""

    stored_axes: str
    axes_here: str
    axes: tuple[tuple[str, int], ...] = ()

    def from_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.stored_axes} -> {self.axes_here}", **dict(self.axes))

    def to_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.axes_here} -> {self.stored_axes}", **dict(self.axes))


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor, under its Hugging Face name. A parameter is its parts, stacked along rows."""

    name: str
    shape: tuple[int, ...]
    layout: AxisLayout | None = None

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Return the shape it has among our parameters."""
        if self.layout is None:
            return self.shape
        return tuple(self.layout.from_stored(torch.empty(self.shape, device="meta")).shape)


Parameter = tuple[str, tuple[StoredPart, ...]]  # our name, and its parts
StoredParts = dict[str, tuple[StoredPart, ...]]


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape: `[rows, columns]` for a projection, `[rows]` for a norm or bias,
    `[head]` for sink logits, `[expert, ...]` for experts, `[head, rows, latent]` for what latent attention absorbs."""
    parameters = stored_parts(spec).items()
    return {name: (sum(part.shape_here[0] for part in parts), *parts[0].shape_here[1:]) for name, parts in parameters}


def stored_parts(spec: ModelSpec) -> StoredParts:
    """Return every parameter's stored parts, in the order of the layers. Rows of query and key keep Hugging Face's own
    order, in which rotary pairs dimension d with d + dim / 2."""
    parts: StoredParts = {
        "embedding.weight": (StoredPart("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)),)
    }
    for index, layer in enumerate(spec.layers):
        parts.update(_layer(f"blocks.{index}", f"model.layers.{index}", layer, spec.hidden_size))
    parts["norm.weight"] = (StoredPart("model.norm.weight", (spec.hidden_size,)),)
    if not spec.tie_word_embeddings:
        parts["head.weight"] = (StoredPart("lm_head.weight", (spec.vocab_size, spec.hidden_size)),)
    return parts


def part_bytes(part: StoredPart, itemsize: int) -> int:
    return math.prod(part.shape) * itemsize


def _layer(ours: str, theirs: str, layer: LayerSpec, width: int) -> Iterator[Parameter]:
    norms = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
    if layer.post_norms:
        norms |= {
            "attention_post_norm": "post_attention_layernorm",
            "feedforward_norm": "pre_feedforward_layernorm",
            "feedforward_post_norm": "post_feedforward_layernorm",
        }
    yield _norm(f"{ours}.attention_norm", f"{theirs}.{norms.pop('attention_norm')}", width)
    attention = layer.attention
    places = f"{ours}.attention", f"{theirs}.self_attn"
    if isinstance(attention, MLASpec):
        yield from _latent(*places, attention, width)
    else:
        yield from _grouped(*places, attention, width)
    for name, stored in norms.items():
        yield _norm(f"{ours}.{name}", f"{theirs}.{stored}", width)
    rest = _feedforward if layer.experts is None else _mixture
    yield from rest(f"{ours}.feedforward", f"{theirs}.mlp", layer, width)


def _grouped(ours: str, theirs: str, spec: AttentionSpec, width: int) -> Iterator[Parameter]:
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {f"{theirs}.q_proj": query, f"{theirs}.k_proj": key, f"{theirs}.v_proj": key}
    yield from _linear(f"{ours}.qkv", rows, width, spec.qkv_bias)
    yield from _linear(f"{ours}.output", {f"{theirs}.o_proj": width}, query, spec.o_proj_bias)
    if spec.qk_norm:
        yield _norm(f"{ours}.query_norm", f"{theirs}.q_norm", spec.head_dim)
        yield _norm(f"{ours}.key_norm", f"{theirs}.k_norm", spec.head_dim)
    if spec.sink_logits:
        yield f"{ours}.sink_logits", (StoredPart(f"{theirs}.sinks", (spec.num_heads,)),)


def _latent(ours: str, theirs: str, spec: MLASpec, width: int) -> Iterator[Parameter]:
    queries = {f"{theirs}.q_proj": spec.query_columns}
    if spec.q_lora_rank is not None:
        queries = {f"{theirs}.q_a_proj": spec.q_lora_rank}
        yield _norm(f"{ours}.query_norm", f"{theirs}.q_a_layernorm", spec.q_lora_rank)
        yield from _linear(f"{ours}.query_up", {f"{theirs}.q_b_proj": spec.query_columns}, spec.q_lora_rank, False)
    rows = {**queries, f"{theirs}.kv_a_proj_with_mqa": spec.head_dim}
    yield from _linear(f"{ours}.down", rows, width, spec.qkv_bias)
    yield _norm(f"{ours}.latent_norm", f"{theirs}.kv_a_layernorm", spec.kv_lora_rank)
    up = AxisLayout("(head row) latent", "head row latent", (("head", spec.num_heads),))
    shape = (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    yield f"{ours}.up", (StoredPart(f"{theirs}.kv_b_proj.weight", shape, up),)
    yield from _linear(f"{ours}.output", {f"{theirs}.o_proj": width}, spec.o_proj_inputs, spec.o_proj_bias)


def _feedforward(ours: str, theirs: str, layer: LayerSpec, width: int) -> Iterator[Parameter]:
    rows = {f"{theirs}.gate_proj": layer.intermediate_size, f"{theirs}.up_proj": layer.intermediate_size}
    yield from _linear(f"{ours}.gate_up", rows, width, layer.mlp_bias)
    yield from _linear(f"{ours}.down", {f"{theirs}.down_proj": width}, layer.intermediate_size, layer.mlp_bias)


def _mixture(ours: str, theirs: str, layer: LayerSpec, width: int) -> Iterator[Parameter]:
    """Yield a mixture's parameters: stored for x @ weight, with gate and up in turns; ours have the gate's rows, then
    the up projection's."""
    assert layer.experts is not None
    count, hidden, two = layer.experts.num_experts, layer.intermediate_size, (("two", 2),)
    yield from _linear(f"{ours}.router", {f"{theirs}.router": count}, width, layer.mlp_bias)
    woven = AxisLayout("expert width (hidden two)", "expert (two hidden) width", two)
    yield f"{ours}.gate_up", (StoredPart(f"{theirs}.experts.gate_up_proj", (count, width, 2 * hidden), woven),)
    turned = AxisLayout("expert hidden width", "expert width hidden")
    yield f"{ours}.down", (StoredPart(f"{theirs}.experts.down_proj", (count, hidden, width), turned),)
    if layer.mlp_bias:
        woven = AxisLayout("expert (hidden two)", "expert (two hidden)", two)
        yield f"{ours}.gate_up_bias", (StoredPart(f"{theirs}.experts.gate_up_proj_bias", (count, 2 * hidden), woven),)
        yield f"{ours}.down_bias", (StoredPart(f"{theirs}.experts.down_proj_bias", (count, width)),)


def _norm(ours: str, theirs: str, width: int) -> Parameter:
    return f"{ours}.weight", (StoredPart(f"{theirs}.weight", (width,)),)


def _linear(ours: str, rows: dict[str, int], columns: int, bias: bool) -> Iterator[Parameter]:
    yield f"{ours}.weight", tuple(StoredPart(f"{name}.weight", (size, columns)) for name, size in rows.items())
    if bias:
        yield f"{ours}.bias", tuple(StoredPart(f"{name}.bias", (size,)) for name, size in rows.items())
