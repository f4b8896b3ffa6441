"""Parameters: their names, their shapes, and the Hugging Face tensors each is stacked from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from workbench.model.latent_spec import LatentAttention
from workbench.model.spec import Attention, LayerKind, ModelSpec


@dataclass(frozen=True)
class Layout:
    """The order of a stored tensor's axes and of ours: two sides of an einops pattern, which can be read either way."""

    stored: str
    ours: str
    axes: tuple[tuple[str, int], ...] = ()

    def read(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.stored} -> {self.ours}", **dict(self.axes))

    def written(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.ours} -> {self.stored}", **dict(self.axes))


@dataclass(frozen=True)
class Part:
    """One stored tensor, under its Hugging Face name. A parameter is its parts, stacked along rows."""

    name: str
    shape: tuple[int, ...]
    layout: Layout | None = None

    @property
    def ours(self) -> tuple[int, ...]:
        """Return the shape it has among our parameters."""
        if self.layout is None:
            return self.shape
        return tuple(self.layout.read(torch.empty(self.shape, device="meta")).shape)


Parameter = tuple[str, tuple[Part, ...]]  # our name, and its parts
Parts = dict[str, tuple[Part, ...]]


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape: `[rows, columns]` for a projection, `[rows]` for a norm or bias,
    `[head]` for sink logits, `[expert, ...]` for experts, `[head, rows, latent]` for what latent attention absorbs."""
    parameters = stored_parts(spec).items()
    return {name: (sum(part.ours[0] for part in parts), *parts[0].ours[1:]) for name, parts in parameters}


def stored_parts(spec: ModelSpec) -> Parts:
    """Return every parameter's stored parts, in the order of the layers. Rows of query and key keep Hugging Face's own
    order, in which rotary pairs dimension d with d + dim / 2."""
    parts: Parts = {"embedding.weight": (Part("model.embed_tokens.weight", (spec.vocab, spec.width)),)}
    for index, layer in enumerate(spec.layers):
        parts.update(_layer(f"blocks.{index}", f"model.layers.{index}", layer, spec.width))
    parts["norm.weight"] = (Part("model.norm.weight", (spec.width,)),)
    if not spec.tied:
        parts["head.weight"] = (Part("lm_head.weight", (spec.vocab, spec.width)),)
    return parts


def part_bytes(part: Part, itemsize: int) -> int:
    return math.prod(part.shape) * itemsize


def _layer(ours: str, theirs: str, layer: LayerKind, width: int) -> Iterator[Parameter]:
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
    if isinstance(attention, LatentAttention):
        yield from _latent(*places, attention, width)
    else:
        yield from _grouped(*places, attention, width)
    for name, stored in norms.items():
        yield _norm(f"{ours}.{name}", f"{theirs}.{stored}", width)
    rest = _feedforward if layer.experts is None else _mixture
    yield from rest(f"{ours}.feedforward", f"{theirs}.mlp", layer, width)


def _grouped(ours: str, theirs: str, spec: Attention, width: int) -> Iterator[Parameter]:
    query, key = spec.heads * spec.dim, spec.groups * spec.dim
    rows = {f"{theirs}.q_proj": query, f"{theirs}.k_proj": key, f"{theirs}.v_proj": key}
    yield from _linear(f"{ours}.qkv", rows, width, spec.input_bias)
    yield from _linear(f"{ours}.output", {f"{theirs}.o_proj": width}, query, spec.output_bias)
    if spec.qk_norm:
        yield _norm(f"{ours}.query_norm", f"{theirs}.q_norm", spec.dim)
        yield _norm(f"{ours}.key_norm", f"{theirs}.k_norm", spec.dim)
    if spec.sink_logits:
        yield f"{ours}.sink_logits", (Part(f"{theirs}.sinks", (spec.heads,)),)


def _latent(ours: str, theirs: str, spec: LatentAttention, width: int) -> Iterator[Parameter]:
    queries = {f"{theirs}.q_proj": spec.queries}
    if spec.query_latent is not None:
        queries = {f"{theirs}.q_a_proj": spec.query_latent}
        yield _norm(f"{ours}.query_norm", f"{theirs}.q_a_layernorm", spec.query_latent)
        yield from _linear(f"{ours}.query_up", {f"{theirs}.q_b_proj": spec.queries}, spec.query_latent, False)
    rows = {**queries, f"{theirs}.kv_a_proj_with_mqa": spec.dim}
    yield from _linear(f"{ours}.down", rows, width, spec.input_bias)
    yield _norm(f"{ours}.latent_norm", f"{theirs}.kv_a_layernorm", spec.latent)
    up = Layout("(head row) latent", "head row latent", (("head", spec.heads),))
    shape = (spec.heads * (spec.plain_dim + spec.value_dim), spec.latent)
    yield f"{ours}.up", (Part(f"{theirs}.kv_b_proj.weight", shape, up),)
    yield from _linear(f"{ours}.output", {f"{theirs}.o_proj": width}, spec.mixed, spec.output_bias)


def _feedforward(ours: str, theirs: str, layer: LayerKind, width: int) -> Iterator[Parameter]:
    rows = {f"{theirs}.gate_proj": layer.hidden, f"{theirs}.up_proj": layer.hidden}
    yield from _linear(f"{ours}.gate_up", rows, width, layer.feedforward_bias)
    yield from _linear(f"{ours}.down", {f"{theirs}.down_proj": width}, layer.hidden, layer.feedforward_bias)


def _mixture(ours: str, theirs: str, layer: LayerKind, width: int) -> Iterator[Parameter]:
    """Yield a mixture's parameters: stored for x @ weight, with gate and up in turns; ours have the gate's rows, then
    the up projection's."""
    assert layer.experts is not None
    count, hidden, two = layer.experts.count, layer.hidden, (("two", 2),)
    yield from _linear(f"{ours}.router", {f"{theirs}.router": count}, width, layer.feedforward_bias)
    woven = Layout("expert width (hidden two)", "expert (two hidden) width", two)
    yield f"{ours}.gate_up", (Part(f"{theirs}.experts.gate_up_proj", (count, width, 2 * hidden), woven),)
    turned = Layout("expert hidden width", "expert width hidden")
    yield f"{ours}.down", (Part(f"{theirs}.experts.down_proj", (count, hidden, width), turned),)
    if layer.feedforward_bias:
        woven = Layout("expert (hidden two)", "expert (two hidden)", two)
        yield f"{ours}.gate_up_bias", (Part(f"{theirs}.experts.gate_up_proj_bias", (count, 2 * hidden), woven),)
        yield f"{ours}.down_bias", (Part(f"{theirs}.experts.down_proj_bias", (count, width)),)


def _norm(ours: str, theirs: str, width: int) -> Parameter:
    return f"{ours}.weight", (Part(f"{theirs}.weight", (width,)),)


def _linear(ours: str, rows: dict[str, int], columns: int, bias: bool) -> Iterator[Parameter]:
    yield f"{ours}.weight", tuple(Part(f"{name}.weight", (size, columns)) for name, size in rows.items())
    if bias:
        yield f"{ours}.bias", tuple(Part(f"{name}.bias", (size,)) for name, size in rows.items())
