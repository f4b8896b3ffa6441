"""Our parameters: their names, their shapes, and the Hugging Face tensors each is stacked from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from workbench.model.spec import LayerKind, ModelSpec


@dataclass(frozen=True)
class Part:
    """One stored tensor, under its Hugging Face name. A parameter is its parts, stacked along rows."""

    name: str
    shape: tuple[int, ...]


Parameter = tuple[str, tuple[Part, ...]]  # our name, and its parts
Parts = dict[str, tuple[Part, ...]]


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape: `[rows, columns]` for a projection, `[rows]` for a norm or bias,
    `[head]` for sink logits."""
    parameters = stored_parts(spec).items()
    return {name: (sum(part.shape[0] for part in parts), *parts[0].shape[1:]) for name, parts in parameters}


def stored_parts(spec: ModelSpec) -> Parts:
    """Every parameter's parts, in the order of the text. Rows of query and key keep Hugging Face's own order,
    in which rotary turns dimension d against d + dim / 2."""
    parts: Parts = {"embedding.weight": (Part("model.embed_tokens.weight", (spec.vocab, spec.width)),)}
    for index, layer in enumerate(spec.layers):
        parts.update(_layer(index, layer, spec.width))
    parts["norm.weight"] = (Part("model.norm.weight", (spec.width,)),)
    if not spec.tied:
        parts["head.weight"] = (Part("lm_head.weight", (spec.vocab, spec.width)),)
    return parts


def part_bytes(part: Part, itemsize: int) -> int:
    return math.prod(part.shape) * itemsize


def _layer(index: int, layer: LayerKind, width: int) -> Iterator[Parameter]:
    attention, hidden = layer.attention, layer.hidden
    query, key = attention.heads * attention.dim, attention.groups * attention.dim
    ours, theirs = f"blocks.{index}", f"model.layers.{index}"
    input_bias, output_bias, bias = attention.input_bias, attention.output_bias, layer.feedforward_bias
    yield f"{ours}.attention_norm.weight", (Part(f"{theirs}.input_layernorm.weight", (width,)),)
    read = f"{theirs}.self_attn"
    rows = {f"{read}.q_proj": query, f"{read}.k_proj": key, f"{read}.v_proj": key}
    yield from _linear(f"{ours}.attention.qkv", rows, width, input_bias)
    yield from _linear(f"{ours}.attention.output", {f"{read}.o_proj": width}, query, output_bias)
    if attention.qk_norm:
        yield f"{ours}.attention.query_norm.weight", (Part(f"{read}.q_norm.weight", (attention.dim,)),)
        yield f"{ours}.attention.key_norm.weight", (Part(f"{read}.k_norm.weight", (attention.dim,)),)
    if attention.sink_logits:
        yield f"{ours}.attention.sink_logits", (Part(f"{read}.sinks", (attention.heads,)),)
    yield f"{ours}.feedforward_norm.weight", (Part(f"{theirs}.post_attention_layernorm.weight", (width,)),)
    rows = {f"{theirs}.mlp.gate_proj": hidden, f"{theirs}.mlp.up_proj": hidden}
    yield from _linear(f"{ours}.feedforward.gate_up", rows, width, bias)
    yield from _linear(f"{ours}.feedforward.down", {f"{theirs}.mlp.down_proj": width}, hidden, bias)


def _linear(ours: str, rows: dict[str, int], columns: int, bias: bool) -> Iterator[Parameter]:
    yield f"{ours}.weight", tuple(Part(f"{name}.weight", (size, columns)) for name, size in rows.items())
    if bias:
        yield f"{ours}.bias", tuple(Part(f"{name}.bias", (size,)) for name, size in rows.items())
