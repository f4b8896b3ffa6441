"""Parameters: their names, their shapes, and the stored tensors that each is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec
from workbench.model.checkpoint_names import LLAMA_NAMES, CheckpointNames
from workbench.model.recurrent_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from workbench.model.rotary import rotary_column_order
from workbench.model.spec import AltUpSpec, LayerSpec, ModelSpec


class Layout(Protocol):
    """A change of order between a stored tensor and ours, which can be read either way."""

    def from_stored(self, tensor: Tensor) -> Tensor: ...

    def to_stored(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AxisLayout:
    """The order of a stored tensor's axes and of ours: two sides of an einops pattern."""

    stored_axes: str
    axes_here: str
    axes: tuple[tuple[str, int], ...] = ()

    def from_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.stored_axes} -> {self.axes_here}", **dict(self.axes))

    def to_stored(self, tensor: Tensor) -> Tensor:
        return rearrange(tensor, f"{self.axes_here} -> {self.stored_axes}", **dict(self.axes))


@dataclass(frozen=True)
class RowLayout:
    """For each row here its row in the stored tensor, which may be transposed."""

    rows: tuple[int, ...]
    transposed: bool = False

    def from_stored(self, tensor: Tensor) -> Tensor:
        tensor = tensor.T if self.transposed else tensor
        return tensor if tensor.is_meta else tensor[torch.tensor(self.rows)]

    def to_stored(self, tensor: Tensor) -> Tensor:
        stored = tensor[torch.tensor(self.rows).argsort()]
        return stored.T if self.transposed else stored


TRANSPOSED = AxisLayout("column row", "row column")


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor, under its name in the checkpoint. A parameter is its parts, stacked along rows."""

    name: str
    shape: tuple[int, ...]
    layout: Layout | None = None

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Return the shape it has among our parameters."""
        if self.layout is None:
            return self.shape
        return tuple(self.layout.from_stored(torch.empty(self.shape, device="meta")).shape)


@dataclass(frozen=True)
class StoredParameter:
    """A parameter's parts, and its shape where that is another than of the stacked parts."""

    parts: tuple[StoredPart, ...]
    viewed_as: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.viewed_as is not None:
            return self.viewed_as
        shapes = [part.shape_here for part in self.parts]
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def to_stored(self, tensor: Tensor) -> Iterator[tuple[StoredPart, Tensor]]:
        """Yield each part with its rows of the parameter, or of codes or scales row by row, in the stored order."""
        rows = [part.shape_here[0] for part in self.parts]
        if self.viewed_as is not None:
            tensor = tensor.reshape(sum(rows), *self.parts[0].shape_here[1:])
        for part, own in zip(self.parts, tensor.split(rows), strict=True):
            yield part, own if part.layout is None else part.layout.to_stored(own)


Named = Iterator[tuple[str, StoredParameter]]  # a parameter of ours, by its name


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape: `[rows, columns]` for a projection, `[rows]` for a norm or bias,
    `[head]` for sink logits, `[expert, ...]` for experts, `[head, rows, latent]` for what latent attention absorbs."""
    return {name: parameter.shape for name, parameter in stored_parameters(spec).items()}


def stored_parameters(spec: ModelSpec, names: CheckpointNames = LLAMA_NAMES) -> dict[str, StoredParameter]:
    """Return every parameter's stored parts, in the order of the layers.

    Rows of queries and keys are put in the order in which rotary pairs column i with i + head_dim / 2.
    """
    width, vocab = spec.hidden_size, spec.vocab_size
    found = {"embedding.weight": _whole(f"{names.embedding}.weight", vocab, width)}
    if spec.learned_positions is not None:
        rows = spec.max_position_embeddings + spec.learned_positions
        found["positions.weight"] = _whole(f"{names.positions}.weight", rows, width)
    if spec.embedding_norm:
        found |= dict(_norm("embedding_norm", names.embedding_norm, spec))
    for index, layer in enumerate(spec.layers):
        found |= dict(_layer(f"blocks.{index}", f"{names.layer}.{index}.", layer, spec, names))
    if spec.altup is not None:
        found |= dict(_streams("streams", names.layer.rpartition(".")[0], spec, spec.altup))
    found |= dict(_norm("norm", names.norm, spec))
    if not spec.tie_word_embeddings:
        found["head.weight"] = _whole(f"{names.head}.weight", vocab, width)
    if spec.head_bias:
        found["head.bias"] = _whole(f"{names.head}.bias", vocab)
    return found


def part_bytes(part: StoredPart, itemsize: int) -> int:
    return math.prod(part.shape) * itemsize


def _layer(ours: str, theirs: str, layer: LayerSpec, spec: ModelSpec, names: CheckpointNames) -> Named:
    if layer.norms != "post":
        yield from _norm(f"{ours}.attention_norm", theirs + names.attention_norm, spec)
    if layer.norms != "pre":
        yield from _norm(f"{ours}.attention_post_norm", theirs + names.attention_post_norm, spec)
        yield from _norm(f"{ours}.feedforward_post_norm", theirs + names.feedforward_post_norm, spec)
    if layer.norms != "post" and layer.parallel != "one_norm" and layer.intermediate_size:
        yield from _norm(f"{ours}.feedforward_norm", theirs + names.feedforward_norm, spec)
    for part, mixer in zip(("attention", "recurrent"), layer.mixers, strict=False):
        yield from _mixer(f"{ours}.{part}", theirs, mixer, spec, names)
    if spec.altup is not None:
        yield from _altup(ours, theirs, spec, spec.altup)
    if not layer.intermediate_size:
        return
    rest = _feedforward if layer.experts is None else _mixture
    yield from rest(f"{ours}.feedforward", theirs, layer, spec.hidden_size, names)


def _mixer(ours: str, theirs: str, mixer: AnyAttentionSpec, spec: ModelSpec, names: CheckpointNames) -> Named:
    if isinstance(mixer, MLASpec):
        yield from _latent(ours, f"{theirs}self_attn", mixer, spec.hidden_size)
    elif isinstance(mixer, ShortConvSpec):
        yield from _short_conv(ours, theirs + names.recurrent, mixer, spec.hidden_size)
    elif isinstance(mixer, DeltaNetSpec):
        yield from _delta_net(ours, theirs + names.recurrent, mixer, spec.hidden_size)
    elif isinstance(mixer, Mamba2Spec):
        yield from _mamba2(ours, theirs + names.recurrent, mixer, spec.hidden_size)
    else:
        yield from _grouped(ours, theirs, mixer, spec, names)


def _grouped(ours: str, theirs: str, a: AttentionSpec, spec: ModelSpec, names: CheckpointNames) -> Named:
    width, dim = spec.hidden_size, a.head_dim
    order = list(range(dim))
    if a.position == "rotary":
        order = rotary_column_order(dim, a.rotary_dim, names.interleaved)
    counts = {"queries": a.num_heads, "keys": a.num_kv_heads, "values": a.num_kv_heads}
    counts = counts if a.kv_shared_with is None else {"queries": a.num_heads}
    if names.qkv:
        first = _first_rows(a, names.qkv_order)
        rows = [at + column for kind in counts for at in first[kind] for column in _columns(kind, order)]
        yield from _rows(f"{ours}.qkv", {theirs + names.qkv: rows}, width, a.qkv_bias, names.transposed)
    else:
        rows_of = {
            theirs + getattr(names, kind): [head * dim + c for head in range(count) for c in _columns(kind, order)]
            for kind, count in counts.items()
        }
        if a.output_gate:  # stored head by head: a query, then its gate
            pairs = (
                (half, head, columns)
                for half, columns in enumerate((order, sorted(order)))
                for head in range(a.num_heads)
            )
            rows_of[theirs + names.queries] = [
                (2 * head + half) * dim + c for half, head, columns in pairs for c in columns
            ]
        yield from _rows(f"{ours}.qkv", rows_of, width, a.qkv_bias, names.transposed)
    yield from _linear(
        f"{ours}.output", {theirs + names.output: width}, a.num_heads * dim, a.o_proj_bias, names.transposed
    )
    for name, stored, heads in (
        ("query_norm", names.query_norm, a.num_heads),
        ("key_norm", names.key_norm, a.num_own_kv_heads),
    ):
        yield from _head_norm(f"{ours}.{name}", theirs + stored, a, heads, order, names)
    if a.sink_logits:
        yield f"{ours}.sink_logits", _whole(theirs + names.sinks, a.num_heads)


def _columns(kind: str, order: list[int]) -> list[int]:
    """Return the order of a head's columns: values are not rotated."""
    return order if kind != "values" else sorted(order)


def _first_rows(a: AttentionSpec, order: str) -> dict[str, list[int]]:
    """Return the first row of each head of a fused projection."""
    dim, heads, groups, shared = a.head_dim, a.num_heads, a.num_kv_heads, a.queries_per_kv
    if order == "stacked":
        starts = list(range(0, (heads + 2 * groups) * dim, dim))
        return {"queries": starts[:heads], "keys": starts[heads : heads + groups], "values": starts[heads + groups :]}
    size = (shared + 2) * dim  # of a key/value head with its queries; of a head where none is shared
    return {
        "queries": [group * size + each * dim for group in range(groups) for each in range(shared)],
        "keys": [group * size + shared * dim for group in range(groups)],
        "values": [group * size + (shared + 1) * dim for group in range(groups)],
    }


def _head_norm(ours: str, theirs: str, a: AttentionSpec, heads: int, order: list[int], names: CheckpointNames) -> Named:
    if a.qk_norm is None or a.qk_norm.weight == "none" or not heads:
        return
    own = a.qk_norm.weight == "per_head"
    count = heads if own or a.qk_norm.over == "projection" else 1
    shape = (heads, a.head_dim) if own else None
    rows = [head * a.head_dim + column for head in range(count) for column in order]
    for kind in ("weight", "bias")[: 1 + a.qk_norm.bias]:
        if own and names.norm_per_head:
            parts = tuple(
                StoredPart(f"{theirs}{names.norm_per_head}{head}.{kind}", (a.head_dim,), _row_layout(order, False))
                for head in range(heads)
            )
        elif own:
            layout = AxisLayout("head dim", "(head dim)", (("dim", a.head_dim),))
            parts = (StoredPart(f"{theirs}.{kind}", (heads, a.head_dim), _Chain(layout, _row_layout(rows, False))),)
        else:
            parts = (StoredPart(f"{theirs}.{kind}", (count * a.head_dim,), _row_layout(rows, False)),)
        yield f"{ours}.{kind}", StoredParameter(parts, shape)


@dataclass(frozen=True)
class _Chain:
    """Two layouts, one after the other; the second may be none."""

    first: Layout
    second: Layout | None

    def from_stored(self, tensor: Tensor) -> Tensor:
        tensor = self.first.from_stored(tensor)
        return tensor if self.second is None else self.second.from_stored(tensor)

    def to_stored(self, tensor: Tensor) -> Tensor:
        return self.first.to_stored(tensor if self.second is None else self.second.to_stored(tensor))


def _latent(ours: str, theirs: str, spec: MLASpec, width: int) -> Named:
    queries = {f"{theirs}.q_proj": spec.query_columns}
    if spec.q_lora_rank is not None:
        queries = {f"{theirs}.q_a_proj": spec.q_lora_rank}
        yield f"{ours}.query_norm.weight", _whole(f"{theirs}.q_a_layernorm.weight", spec.q_lora_rank)
        yield from _linear(f"{ours}.query_up", {f"{theirs}.q_b_proj": spec.query_columns}, spec.q_lora_rank)
    rows = {**queries, f"{theirs}.kv_a_proj_with_mqa": spec.head_dim}
    yield from _linear(f"{ours}.down", rows, width, spec.qkv_bias)
    yield f"{ours}.latent_norm.weight", _whole(f"{theirs}.kv_a_layernorm.weight", spec.kv_lora_rank)
    up = AxisLayout("(head row) latent", "head row latent", (("head", spec.num_heads),))
    shape = (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    yield f"{ours}.up", StoredParameter((StoredPart(f"{theirs}.kv_b_proj.weight", shape, up),))
    yield from _linear(f"{ours}.output", {f"{theirs}.o_proj": width}, spec.o_proj_inputs, spec.o_proj_bias)


def _short_conv(ours: str, theirs: str, spec: ShortConvSpec, width: int) -> Named:
    yield from _linear(f"{ours}.input", {f"{theirs}.in_proj": 3 * spec.channels}, width, spec.bias)
    yield from _conv(f"{ours}.conv", f"{theirs}.conv", spec.channels, spec.kernel, spec.bias)
    yield from _linear(f"{ours}.output", {f"{theirs}.out_proj": width}, spec.channels, spec.bias)


def _delta_net(ours: str, theirs: str, spec: DeltaNetSpec, width: int) -> Named:
    """Yield a delta net's parameters: its projections are stored key head by key head."""
    shared = spec.num_value_heads // spec.num_key_heads
    values = shared * spec.value_dim
    stored = {
        f"{theirs}.in_proj_qkvz": _by_kind(spec.num_key_heads, (spec.key_dim, spec.key_dim, values, values)),
        f"{theirs}.in_proj_ba": _by_kind(spec.num_key_heads, (shared, shared)),
    }
    yield from _rows(f"{ours}.input", stored, width, False, False)
    yield from _conv(f"{ours}.conv", f"{theirs}.conv1d", spec.channels, spec.kernel, False)
    yield f"{ours}.log_decay", _whole(f"{theirs}.A_log", spec.num_value_heads)
    yield f"{ours}.decay_bias", _whole(f"{theirs}.dt_bias", spec.num_value_heads)
    yield f"{ours}.norm_weight", _whole(f"{theirs}.norm.weight", spec.value_dim)
    yield from _linear(f"{ours}.output", {f"{theirs}.out_proj": width}, spec.o_proj_inputs)


def _mamba2(ours: str, theirs: str, spec: Mamba2Spec, width: int) -> Named:
    yield from _linear(f"{ours}.input", {f"{theirs}.in_proj": spec.input_columns}, width, spec.bias)
    yield from _conv(f"{ours}.conv", f"{theirs}.conv1d", spec.channels, spec.kernel, spec.conv_bias)
    for name, stored in (("log_decay", "A_log"), ("step_bias", "dt_bias"), ("skip", "D")):
        yield f"{ours}.{name}", _whole(f"{theirs}.{stored}", spec.heads)
    if spec.norm != "none":
        yield f"{ours}.norm_weight", _whole(f"{theirs}.norm.weight", spec.o_proj_inputs)
    yield from _linear(f"{ours}.output", {f"{theirs}.out_proj": width}, spec.o_proj_inputs, spec.o_proj_has_bias)


def _altup(ours: str, theirs: str, spec: ModelSpec, altup: AltUpSpec) -> Named:
    width, count = spec.hidden_size, altup.streams
    for mine, stored in (
        ("stream_norm", "altup.router_norm"),
        ("low_rank_norm", "laurel.post_laurel_norm"),
        ("own_input_norm", "post_per_layer_input_norm"),
    ):
        yield from _norm(f"{ours}.{mine}", theirs + stored, spec)
    for mine, stored, rows, columns in (
        ("stream_router", "altup.modality_router", count, width),
        ("prediction_coefficients", "altup.prediction_coefs", count * count, count),
        ("correction_coefficients", "altup.correction_coefs", count, count),
        ("low_rank_in", "laurel.linear_left", altup.low_rank, width),
        ("low_rank_out", "laurel.linear_right", width, altup.low_rank),
        ("own_input_gate", "per_layer_input_gate", altup.input_columns, width),
        ("own_input_up", "per_layer_projection", width, altup.input_columns),
    ):
        yield from _linear(f"{ours}.{mine}", {theirs + stored: rows}, columns)
    yield f"{ours}.active_scale", _whole(f"{theirs}altup.correct_output_scale", width)


def _streams(ours: str, theirs: str, spec: ModelSpec, altup: AltUpSpec) -> Named:
    width, columns, others = spec.hidden_size, len(spec.layers) * altup.input_columns, altup.streams - 1
    table = f"{theirs}.embed_tokens_per_layer.weight"
    yield f"{ours}.input_embedding.weight", _whole(table, altup.input_vocab_size, columns)
    yield from _linear(f"{ours}.input_proj", {f"{theirs}.per_layer_model_projection": columns}, width)
    yield f"{ours}.input_norm.weight", _whole(f"{theirs}.per_layer_projection_norm.weight", altup.input_columns)
    for mine, stored in (("expand", "altup_projections"), ("merge", "altup_unembed_projections")):
        parts = tuple(StoredPart(f"{theirs}.{stored}.{each}.weight", (width, width)) for each in range(others))
        yield f"{ours}.{mine}", StoredParameter(parts, (others, width, width))


def _by_kind(heads: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the rows, kind by kind, of a tensor that is stored head by head with `sizes` rows of each kind."""
    total, starts = sum(sizes), [sum(sizes[:place]) for place in range(len(sizes))]
    places = [(head * total + start, size) for start, size in zip(starts, sizes, strict=True) for head in range(heads)]
    return [first + row for first, size in places for row in range(size)]


def _conv(ours: str, theirs: str, channels: int, kernel: int, bias: bool) -> Named:
    flat = AxisLayout("channel 1 kernel", "channel kernel")
    yield f"{ours}.weight", StoredParameter((StoredPart(f"{theirs}.weight", (channels, 1, kernel), flat),))
    if bias:
        yield f"{ours}.bias", _whole(f"{theirs}.bias", channels)


def _feedforward(ours: str, theirs: str, layer: LayerSpec, width: int, names: CheckpointNames) -> Named:
    hidden, bias = layer.intermediate_size, layer.mlp_bias
    if not layer.activation.gated:
        yield from _linear(f"{ours}.up", {theirs + names.up: hidden}, width, bias, names.transposed)
        if layer.activation.kind == "xielu":
            for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
                part = StoredPart(f"{theirs}{names.activation}.{name}", shape)
                yield f"{ours}.activation.{name}", StoredParameter((part,), shape)
    else:
        rows = {theirs + names.gate: hidden, theirs + names.up: hidden}
        rows = {theirs + names.gate_up: 2 * hidden} if names.gate_up else rows
        yield from _linear(f"{ours}.gate_up", rows, width, bias, names.transposed)
    yield from _linear(f"{ours}.down", {theirs + names.down: width}, hidden, bias, names.transposed)


def _mixture(ours: str, theirs: str, layer: LayerSpec, width: int, names: CheckpointNames) -> Named:
    """Yield a mixture's parameters: ours have the gate's rows, then the up projection's, expert by expert."""
    assert layer.experts is not None
    count, hidden, shared = layer.experts.num_experts, layer.intermediate_size, layer.experts.shared_intermediate_size
    yield from _linear(f"{ours}.router", {theirs + names.router: count}, width, layer.experts.router_bias)
    if layer.experts.router.selection_bias:
        yield f"{ours}.router.selection_bias", _whole(theirs + names.selection_bias, count)
    gate, up, down = (theirs + name for name in (names.expert_gate, names.expert_up, names.expert_down))
    if names.experts == "apart":
        rows = (name.format(expert=expert) for expert in range(count) for name in (gate, up))
        parts = tuple(StoredPart(f"{name}.weight", (hidden, width)) for name in rows)
        yield f"{ours}.gate_up", StoredParameter(parts, (count, 2 * hidden, width))
        parts = tuple(StoredPart(f"{down.format(expert=expert)}.weight", (width, hidden)) for expert in range(count))
        yield f"{ours}.down", StoredParameter(parts, (count, width, hidden))
        if layer.mlp_bias:
            rows = (name.format(expert=expert) for expert in range(count) for name in (gate, up))
            parts = tuple(StoredPart(f"{name}.bias", (hidden,)) for name in rows)
            yield f"{ours}.gate_up_bias", StoredParameter(parts, (count, 2 * hidden))
            parts = tuple(StoredPart(f"{down.format(expert=expert)}.bias", (width,)) for expert in range(count))
            yield f"{ours}.down_bias", StoredParameter(parts, (count, width))
    elif names.experts == "fused":
        yield f"{ours}.gate_up", _whole(f"{gate}.weight", count, 2 * hidden, width)
        yield f"{ours}.down", _whole(f"{down}.weight", count, width, hidden)
        assert not layer.mlp_bias, "no family stores fused experts with biases"
    else:
        pairs, two = "(hidden two)" if names.experts == "woven" else "(two hidden)", (("two", 2),)
        layout = AxisLayout(f"expert width {pairs}", "expert (two hidden) width", two)
        yield f"{ours}.gate_up", StoredParameter((StoredPart(gate, (count, width, 2 * hidden), layout),))
        layout = AxisLayout("expert hidden width", "expert width hidden")
        yield f"{ours}.down", StoredParameter((StoredPart(down, (count, hidden, width), layout),))
        if layer.mlp_bias:
            woven = AxisLayout(f"expert {pairs}", "expert (two hidden)", two)
            yield f"{ours}.gate_up_bias", StoredParameter((StoredPart(f"{gate}_bias", (count, 2 * hidden), woven),))
            yield f"{ours}.down_bias", _whole(f"{down}_bias", count, width)
    if shared:
        rows = {f"{theirs}{names.shared}.gate_proj": shared, f"{theirs}{names.shared}.up_proj": shared}
        yield from _linear(f"{ours}.shared.gate_up", rows, width)
        yield from _linear(f"{ours}.shared.down", {f"{theirs}{names.shared}.down_proj": width}, shared)
    if layer.experts.shared_gate:
        yield from _linear(f"{ours}.shared_gate", {theirs + names.shared_gate: 1}, width)


def _norm(ours: str, theirs: str, spec: ModelSpec) -> Named:
    for kind, there in (("weight", spec.norm.weight), ("bias", spec.norm.bias)):
        if there:
            yield f"{ours}.{kind}", _whole(f"{theirs}.{kind}", spec.hidden_size)


def _whole(name: str, *shape: int) -> StoredParameter:
    return StoredParameter((StoredPart(name, shape),))


def _linear(ours: str, rows: dict[str, int], columns: int, bias: bool = False, transposed: bool = False) -> Named:
    """Yield the matrix and bias of a product whose stored tensors have so many rows."""
    parts = []
    for name, size in rows.items():
        shape, layout = ((columns, size), TRANSPOSED) if transposed else ((size, columns), None)
        parts.append(StoredPart(f"{name}.weight", shape, layout))
    yield f"{ours}.weight", StoredParameter(tuple(parts))
    if bias:
        yield f"{ours}.bias", StoredParameter(tuple(StoredPart(f"{n}.bias", (size,)) for n, size in rows.items()))


def _rows(ours: str, rows: dict[str, list[int]], columns: int, bias: bool, transposed: bool) -> Named:
    """Yield the matrix and bias of a product whose rows are these rows of stored tensors."""
    parts, biases = [], []
    for name, order in rows.items():
        size = len(order)
        parts.append(
            StoredPart(
                f"{name}.weight", (columns, size) if transposed else (size, columns), _row_layout(order, transposed)
            )
        )
        biases.append(StoredPart(f"{name}.bias", (size,), _row_layout(order, False)))
    yield f"{ours}.weight", StoredParameter(tuple(parts))
    if bias:
        yield f"{ours}.bias", StoredParameter(tuple(biases))


def _row_layout(order: list[int], transposed: bool) -> Layout | None:
    if order == list(range(len(order))):
        return TRANSPOSED if transposed else None
    return RowLayout(tuple(order), transposed)
