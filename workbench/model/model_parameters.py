"""List every parameter of a model: its name, its shape, and its stored tensors."""

from __future__ import annotations

from workbench.model.attention_parameters import mixer_parameters
from workbench.model.checkpoint_names import LLAMA_NAMES, CheckpointNames
from workbench.model.parameters import AxisLayout, Named, StoredParameter, StoredPart, linear, whole
from workbench.model.spec import AltUpSpec, LayerSpec, ModelSpec


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape: `[rows, columns]` for a projection, `[rows]` for a norm or bias,
    `[head]` for sink logits, `[expert, ...]` for experts, `[head, rows, latent]` for the absorbed matrices of latent
    attention.
    """
    return {name: parameter.shape for name, parameter in stored_parameters(spec).items()}


def stored_parameters(spec: ModelSpec, names: CheckpointNames = LLAMA_NAMES) -> dict[str, StoredParameter]:
    """Return every parameter's stored parts, in the order of the layers.

    Rows of queries and keys are reordered so that rotary pairs column i with i + head_dim / 2.
    """
    width, vocab = spec.hidden_size, spec.vocab_size
    found = {"embedding.weight": whole(f"{names.embedding}.weight", vocab, width)}
    if spec.learned_positions is not None:
        rows = spec.max_position_embeddings + spec.learned_positions
        found["positions.weight"] = whole(f"{names.positions}.weight", rows, width)
    if spec.embedding_norm:
        found |= dict(_norm("embedding_norm", names.embedding_norm, spec))
    for index, layer in enumerate(spec.layers):
        found |= dict(_layer(f"blocks.{index}", f"{names.layer}.{index}.", layer, spec, names))
    if spec.altup is not None:
        found |= dict(_streams("streams", names.layer.rpartition(".")[0], spec, spec.altup))
    found |= dict(_norm("norm", names.norm, spec))
    if not spec.tie_word_embeddings:
        found["head.weight"] = whole(f"{names.head}.weight", vocab, width)
    if spec.head_bias:
        found["head.bias"] = whole(f"{names.head}.bias", vocab)
    return found


def _layer(ours: str, theirs: str, layer: LayerSpec, spec: ModelSpec, names: CheckpointNames) -> Named:
    if layer.norms != "post":
        yield from _norm(f"{ours}.attention_norm", theirs + names.attention_norm, spec)
    if layer.norms != "pre":
        yield from _norm(f"{ours}.attention_post_norm", theirs + names.attention_post_norm, spec)
        yield from _norm(f"{ours}.feedforward_post_norm", theirs + names.feedforward_post_norm, spec)
    if layer.norms != "post" and layer.parallel != "one_norm" and layer.intermediate_size:
        yield from _norm(f"{ours}.feedforward_norm", theirs + names.feedforward_norm, spec)
    for part, mixer in zip(("attention", "recurrent"), layer.mixers, strict=False):
        yield from mixer_parameters(f"{ours}.{part}", theirs, mixer, spec, names)
    if spec.altup is not None:
        yield from _altup(ours, theirs, spec, spec.altup)
    if not layer.intermediate_size:
        return
    rest = _feedforward if layer.experts is None else _mixture
    yield from rest(f"{ours}.feedforward", theirs, layer, spec.hidden_size, names)


def _feedforward(ours: str, theirs: str, layer: LayerSpec, width: int, names: CheckpointNames) -> Named:
    hidden, bias = layer.intermediate_size, layer.mlp_bias
    if not layer.activation.gated:
        yield from linear(f"{ours}.up", {theirs + names.up: hidden}, width, bias, names.transposed)
        if layer.activation.kind == "xielu":
            for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
                part = StoredPart(f"{theirs}{names.activation}.{name}", shape)
                yield f"{ours}.activation.{name}", StoredParameter((part,), shape)
    else:
        rows = {theirs + names.gate: hidden, theirs + names.up: hidden}
        rows = {theirs + names.gate_up: 2 * hidden} if names.gate_up else rows
        yield from linear(f"{ours}.gate_up", rows, width, bias, names.transposed)
    yield from linear(f"{ours}.down", {theirs + names.down: width}, hidden, bias, names.transposed)


def _mixture(ours: str, theirs: str, layer: LayerSpec, width: int, names: CheckpointNames) -> Named:
    """Yield a mixture's parameters: ours have the gate's rows, then the up projection's, expert by expert."""
    assert layer.experts is not None
    every, hidden, shared = layer.experts.num_experts, layer.intermediate_size, layer.experts.shared_intermediate_size
    held = layer.experts.held_experts
    count = len(held)
    yield from linear(f"{ours}.router", {theirs + names.router: every}, width, layer.experts.router_bias)
    if layer.experts.router.selection_bias:
        yield f"{ours}.router.selection_bias", whole(theirs + names.selection_bias, every)
    gate, up, down = (theirs + name for name in (names.expert_gate, names.expert_up, names.expert_down))
    if names.experts == "apart":
        rows = (name.format(expert=expert) for expert in held for name in (gate, up))
        parts = tuple(StoredPart(f"{name}.weight", (hidden, width)) for name in rows)
        yield f"{ours}.gate_up", StoredParameter(parts, (count, 2 * hidden, width))
        parts = tuple(StoredPart(f"{down.format(expert=expert)}.weight", (width, hidden)) for expert in held)
        yield f"{ours}.down", StoredParameter(parts, (count, width, hidden))
        if layer.mlp_bias:
            rows = (name.format(expert=expert) for expert in held for name in (gate, up))
            parts = tuple(StoredPart(f"{name}.bias", (hidden,)) for name in rows)
            yield f"{ours}.gate_up_bias", StoredParameter(parts, (count, 2 * hidden))
            parts = tuple(StoredPart(f"{down.format(expert=expert)}.bias", (width,)) for expert in held)
            yield f"{ours}.down_bias", StoredParameter(parts, (count, width))
    elif names.experts == "fused":
        yield f"{ours}.gate_up", whole(f"{gate}.weight", count, 2 * hidden, width)
        yield f"{ours}.down", whole(f"{down}.weight", count, width, hidden)
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
            yield f"{ours}.down_bias", whole(f"{down}_bias", count, width)
    if shared:
        rows = {f"{theirs}{names.shared}.gate_proj": shared, f"{theirs}{names.shared}.up_proj": shared}
        yield from linear(f"{ours}.shared.gate_up", rows, width)
        yield from linear(f"{ours}.shared.down", {f"{theirs}{names.shared}.down_proj": width}, shared)
    if layer.experts.shared_gate:
        yield from linear(f"{ours}.shared_gate", {theirs + names.shared_gate: 1}, width)


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
        yield from linear(f"{ours}.{mine}", {theirs + stored: rows}, columns)
    yield f"{ours}.active_scale", whole(f"{theirs}altup.correct_output_scale", width)


def _streams(ours: str, theirs: str, spec: ModelSpec, altup: AltUpSpec) -> Named:
    width, columns, others = spec.hidden_size, len(spec.layers) * altup.input_columns, altup.streams - 1
    table = f"{theirs}.embed_tokens_per_layer.weight"
    yield f"{ours}.input_embedding.weight", whole(table, altup.input_vocab_size, columns)
    yield from linear(f"{ours}.input_proj", {f"{theirs}.per_layer_model_projection": columns}, width)
    yield f"{ours}.input_norm.weight", whole(f"{theirs}.per_layer_projection_norm.weight", altup.input_columns)
    for mine, stored in (("expand", "altup_projections"), ("merge", "altup_unembed_projections")):
        parts = tuple(StoredPart(f"{theirs}.{stored}.{each}.weight", (width, width)) for each in range(others))
        yield f"{ours}.{mine}", StoredParameter(parts, (others, width, width))


def _norm(ours: str, theirs: str, spec: ModelSpec) -> Named:
    for kind, there in (("weight", spec.norm.weight), ("bias", spec.norm.bias)):
        if there:
            yield f"{ours}.{kind}", whole(f"{theirs}.{kind}", spec.hidden_size)
