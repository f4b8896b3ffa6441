"""Describe the stored parameters of mixers: grouped attention, latent attention, and recurrent layers."""

from __future__ import annotations

from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.parameters import (
    AxisLayout,
    ChainedLayouts,
    Named,
    StoredParameter,
    StoredPart,
    chosen_rows,
    linear,
    row_layout,
    whole,
)
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from workbench.model.rotary import rotary_column_order
from workbench.model.spec import ModelSpec


def mixer_parameters(ours: str, theirs: str, mixer: AnyAttentionSpec, spec: ModelSpec, names: CheckpointNames) -> Named:
    """Yield each parameter of a layer's attention or recurrence, with its name."""
    width = spec.hidden_size
    if isinstance(mixer, MLASpec):
        yield from _latent(ours, f"{theirs}self_attn", mixer, width)
    elif isinstance(mixer, ShortConvSpec):
        yield from _short_conv(ours, theirs + names.recurrent, mixer, width)
    elif isinstance(mixer, DeltaNetSpec):
        yield from _delta_net(ours, theirs + names.recurrent, mixer, width)
    elif isinstance(mixer, Mamba2Spec):
        yield from _mamba2(ours, theirs + names.recurrent, mixer, width)
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
        yield from chosen_rows(f"{ours}.qkv", {theirs + names.qkv: rows}, width, a.qkv_bias, names.transposed)
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
        yield from chosen_rows(f"{ours}.qkv", rows_of, width, a.qkv_bias, names.transposed)
    yield from linear(
        f"{ours}.output", {theirs + names.output: width}, a.num_heads * dim, a.o_proj_bias, names.transposed
    )
    for name, stored, heads in (
        ("query_norm", names.query_norm, a.num_heads),
        ("key_norm", names.key_norm, a.num_own_kv_heads),
    ):
        yield from _head_norm(f"{ours}.{name}", theirs + stored, a, heads, order, names)
    if a.sink_logits:
        yield f"{ours}.sink_logits", whole(theirs + names.sinks, a.num_heads)


def _columns(kind: str, order: list[int]) -> list[int]:
    """Return the order of a head's columns: values are not rotated."""
    return order if kind != "values" else sorted(order)


def _first_rows(a: AttentionSpec, order: str) -> dict[str, list[int]]:
    """Return the first row of each head of a fused projection."""
    dim, heads, groups, shared = a.head_dim, a.num_heads, a.num_kv_heads, a.queries_per_kv
    if order == "stacked":
        starts = list(range(0, (heads + 2 * groups) * dim, dim))
        return {"queries": starts[:heads], "keys": starts[heads : heads + groups], "values": starts[heads + groups :]}
    size = (shared + 2) * dim  # rows of a key/value head with its queries; of a single head if none is shared
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
                StoredPart(f"{theirs}{names.norm_per_head}{head}.{kind}", (a.head_dim,), row_layout(order, False))
                for head in range(heads)
            )
        elif own:
            layout = AxisLayout("head dim", "(head dim)", (("dim", a.head_dim),))
            parts = (
                StoredPart(f"{theirs}.{kind}", (heads, a.head_dim), ChainedLayouts(layout, row_layout(rows, False))),
            )
        else:
            parts = (StoredPart(f"{theirs}.{kind}", (count * a.head_dim,), row_layout(rows, False)),)
        yield f"{ours}.{kind}", StoredParameter(parts, shape)


def _latent(ours: str, theirs: str, spec: MLASpec, width: int) -> Named:
    queries = {f"{theirs}.q_proj": spec.query_columns}
    if spec.q_lora_rank is not None:
        queries = {f"{theirs}.q_a_proj": spec.q_lora_rank}
        yield f"{ours}.query_norm.weight", whole(f"{theirs}.q_a_layernorm.weight", spec.q_lora_rank)
        yield from linear(f"{ours}.query_up", {f"{theirs}.q_b_proj": spec.query_columns}, spec.q_lora_rank)
    rows = {**queries, f"{theirs}.kv_a_proj_with_mqa": spec.head_dim}
    yield from linear(f"{ours}.down", rows, width, spec.qkv_bias)
    yield f"{ours}.latent_norm.weight", whole(f"{theirs}.kv_a_layernorm.weight", spec.kv_lora_rank)
    up = AxisLayout("(head row) latent", "head row latent", (("head", spec.num_heads),))
    shape = (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    yield f"{ours}.up", StoredParameter((StoredPart(f"{theirs}.kv_b_proj.weight", shape, up),))
    yield from linear(f"{ours}.output", {f"{theirs}.o_proj": width}, spec.o_proj_inputs, spec.o_proj_bias)


def _short_conv(ours: str, theirs: str, spec: ShortConvSpec, width: int) -> Named:
    yield from linear(f"{ours}.input", {f"{theirs}.in_proj": 3 * spec.channels}, width, spec.bias)
    yield from _conv(f"{ours}.conv", f"{theirs}.conv", spec.channels, spec.kernel, spec.bias)
    yield from linear(f"{ours}.output", {f"{theirs}.out_proj": width}, spec.channels, spec.bias)


def _delta_net(ours: str, theirs: str, spec: DeltaNetSpec, width: int) -> Named:
    """Yield a delta net's parameters: its projections are stored key head by key head."""
    shared = spec.num_value_heads // spec.num_key_heads
    values = shared * spec.value_dim
    stored = {
        f"{theirs}.in_proj_qkvz": _by_kind(spec.num_key_heads, (spec.key_dim, spec.key_dim, values, values)),
        f"{theirs}.in_proj_ba": _by_kind(spec.num_key_heads, (shared, shared)),
    }
    yield from chosen_rows(f"{ours}.input", stored, width, False, False)
    yield from _conv(f"{ours}.conv", f"{theirs}.conv1d", spec.channels, spec.kernel, False)
    yield f"{ours}.log_decay", whole(f"{theirs}.A_log", spec.num_value_heads)
    yield f"{ours}.decay_bias", whole(f"{theirs}.dt_bias", spec.num_value_heads)
    yield f"{ours}.norm_weight", whole(f"{theirs}.norm.weight", spec.value_dim)
    yield from linear(f"{ours}.output", {f"{theirs}.out_proj": width}, spec.o_proj_inputs)


def _mamba2(ours: str, theirs: str, spec: Mamba2Spec, width: int) -> Named:
    yield from linear(f"{ours}.input", {f"{theirs}.in_proj": spec.input_columns}, width, spec.bias)
    yield from _conv(f"{ours}.conv", f"{theirs}.conv1d", spec.channels, spec.kernel, spec.conv_bias)
    for name, stored in (("log_decay", "A_log"), ("step_bias", "dt_bias"), ("skip", "D")):
        yield f"{ours}.{name}", whole(f"{theirs}.{stored}", spec.heads)
    if spec.norm != "none":
        yield f"{ours}.norm_weight", whole(f"{theirs}.norm.weight", spec.o_proj_inputs)
    yield from linear(f"{ours}.output", {f"{theirs}.out_proj": width}, spec.o_proj_inputs, spec.o_proj_has_bias)


def _by_kind(heads: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the rows, kind by kind, of a tensor that is stored head by head with `sizes` rows of each kind."""
    total, starts = sum(sizes), [sum(sizes[:place]) for place in range(len(sizes))]
    places = [(head * total + start, size) for start, size in zip(starts, sizes, strict=True) for head in range(heads)]
    return [first + row for first, size in places for row in range(size)]


def _conv(ours: str, theirs: str, channels: int, kernel: int, bias: bool) -> Named:
    flat = AxisLayout("channel 1 kernel", "channel kernel")
    yield f"{ours}.weight", StoredParameter((StoredPart(f"{theirs}.weight", (channels, 1, kernel), flat),))
    if bias:
        yield f"{ours}.bias", whole(f"{theirs}.bias", channels)
