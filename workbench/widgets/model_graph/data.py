"""List the operators of one step of a model in order, each with its FLOPs and bytes by the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec
from workbench.model.cost import visible_pairs
from workbench.model.recurrent.spec import RecurrentSpec
from workbench.model.spec import LayerSpec, ModelSpec

# Sections of a step. Executors call compiled code between them.
Side = Literal["embed", "before", "write", "attend", "after", "head"]


@dataclass(frozen=True)
class GraphStep:
    """One step of one sequence: a prefill of `tokens` tokens, or a decode with a context of `tokens` tokens, the
    decoded one included."""

    kind: Literal["prefill", "decode"]
    tokens: int

    @property
    def span(self) -> tuple[int, int]:
        """Return (start, length) of the tokens that the step computes."""
        return (0, self.tokens) if self.kind == "prefill" else (self.tokens - 1, 1)

    @property
    def length(self) -> int:
        return self.span[1]

    def __str__(self) -> str:
        return (
            f"prefill of {self.tokens:,} tokens"
            if self.kind == "prefill"
            else f"decode at a context of {self.tokens:,}"
        )


@dataclass(frozen=True)
class ValueBytes:
    """The bytes of one value in each store: in the blocks' matrices (with scales), in the head's matrix, and in the
    cache."""

    block: float
    head: float
    cache: float


@dataclass(frozen=True)
class ModelOperator:
    """One operator of a step. `flops` and `bytes` are None if the cost model leaves the operator out.

    `timer` names the timed call of the eager modules that contains the operator; operators with the same timer are
    timed together.
    """

    name: str
    timer: str
    side: Side
    layer: int | None = None
    flops: float | None = None
    bytes: float | None = None
    note: str = ""

    @property
    def key(self) -> str:
        return f"{self.name} {'' if self.layer is None else self.layer}".strip()


def model_operators(spec: ModelSpec, step: GraphStep, values: ValueBytes) -> tuple[ModelOperator, ...]:
    """Return every operator of a step that samples one token, in order of computation."""
    found = [
        ModelOperator("embedding", "embed", "embed", note=f"rows of a table [{spec.vocab_size}, {spec.hidden_size}]")
    ]
    if any(layer.attention.rotary_dim for layer in spec.layers):
        found.append(ModelOperator("rotary angles", "angles", "embed", note="cosines and sines of the positions"))
    for index, layer in enumerate(spec.layers):
        found += _LayerOperators(spec, layer, index, step, values).all()
    weights = spec.vocab_size * spec.hidden_size
    found.append(ModelOperator("final norm", "norm", "head", note="of the sampled row"))
    head = f"[{spec.hidden_size}, {spec.vocab_size}], the sampled row{', tied' if spec.tie_word_embeddings else ''}"
    found.append(ModelOperator("head", "head", "head", None, 2.0 * weights, weights * values.head, head))
    return tuple(found)


@dataclass(frozen=True)
class _LayerOperators:
    """The operators of one layer; timers are names within the block."""

    spec: ModelSpec
    layer: LayerSpec
    index: int
    step: GraphStep
    values: ValueBytes

    def all(self) -> Iterator[ModelOperator]:
        layer, attention = self.layer, self.layer.attention
        if layer.norms != "post":
            yield self._plain("norm before attention", "attention_norm", "before")
        if layer.beside is not None:
            yield from self._mixer(layer.beside.recurrent, "recurrent", "recurrent layer beside: ", "before")
        if isinstance(attention, RecurrentSpec):
            yield from self._mixer(attention, "attention", "", "before")
        elif isinstance(attention, MLASpec):
            yield from self._latent_attention(attention)
        else:
            yield from self._attention(attention)
        if layer.norms != "pre":
            yield self._plain("norm after attention", "attention_post_norm", "after")
        if self.spec.altup is not None:
            parameters = self.spec.altup.matrix_parameters(self.spec.hidden_size)
            yield self._product("residual streams", "block", "after", parameters, "AltUp's own matrices of a layer")
        if not layer.intermediate_size:
            yield self._plain("residual sum", "block", "after")
            return
        if layer.parallel == "two_norms":
            yield self._plain("norm before feed-forward", "feedforward_norm", "after")
        elif layer.parallel == "no":
            name = "residual sum" if layer.norms == "post" else "residual sum and norm"
            yield self._plain(name, "feedforward_norm", "after")
        yield from self._feedforward()
        if layer.norms != "pre":
            yield self._plain("norm after feed-forward", "feedforward_post_norm", "after")
        yield self._plain("residual sum at the end", "block", "after")

    def _attention(self, spec: AttentionSpec) -> Iterator[ModelOperator]:
        hidden = self.spec.hidden_size
        columns = spec.num_projected_heads * spec.head_dim
        what = "query" if spec.kv_shared_with is not None else "query, key and value"
        yield self._product(
            f"{what} projection", "qkv", "before", spec.matrix_parameters(hidden) - hidden * spec.o_proj_inputs,
            f"[{hidden}, {columns}]: {spec.num_heads} query heads, {spec.num_own_kv_heads} key/value heads",
        )  # fmt: skip
        if spec.qk_norm is not None:
            yield self._plain("query and key norm", "head_norms", "before")
        if spec.rotary_dim:
            yield self._plain("rotary", "rotary", "before", f"{spec.rotary_dim} columns of each query and key")
        yield from self._read_cache(spec)
        yield self._product("output projection", "attention.output", "after", hidden * spec.o_proj_inputs,
                            f"[{spec.o_proj_inputs}, {hidden}]")  # fmt: skip

    def _latent_attention(self, spec: MLASpec) -> Iterator[ModelOperator]:
        hidden, latent, heads = self.spec.hidden_size, spec.kv_lora_rank, spec.num_heads
        yield self._product("projection to latents", "qkv", "before", hidden * spec.down_proj_columns,
                            f"[{hidden}, {spec.down_proj_columns}]")  # fmt: skip
        if spec.q_lora_rank is not None:
            parameters = spec.q_lora_rank * spec.query_columns
            yield self._plain("norms of the latents", "head_norms", "before")
            yield self._product("query projection", "query_up", "before", parameters)
        else:
            yield self._plain("norm of the latent", "head_norms", "before")
        yield self._product("queries to the latent", "qkv_proj", "before", latent * heads * spec.qk_nope_head_dim)
        yield self._plain("rotary", "rotary", "before", f"{spec.qk_rope_head_dim} columns of each query and of the key")
        yield from self._read_cache(spec)
        yield self._product("latents to values", "o_proj", "after", latent * heads * spec.v_head_dim)
        yield self._product("output projection", "attention.output", "after", hidden * spec.o_proj_inputs)

    def _read_cache(self, spec: AttentionSpec | MLASpec) -> Iterator[ModelOperator]:
        start, length = self.step.span
        seen, touched = visible_pairs(start, length, spec.sliding_window, spec.num_sink_tokens)
        written = spec.cache_values_per_token * length * self.values.cache
        if spec.cache_values_per_token:
            yield self._counted("write to the cache", "write", "write", 0.0, written)
        columns = spec.head_dim + (spec.kv_lora_rank if isinstance(spec, MLASpec) else spec.head_dim)
        window = f", window {spec.sliding_window}" if spec.sliding_window else ""
        yield self._counted(
            "attention", "attend", "attend", 2.0 * spec.num_heads * columns * seen,
            spec.cache_values_read * touched * self.values.cache,
            f"{spec.queries_per_kv} queries a key/value head; {touched:,} positions are read{window}",
        )  # fmt: skip

    def _mixer(self, spec: RecurrentSpec, module: str, prefix: str, side: Side) -> Iterator[ModelOperator]:
        hidden = self.spec.hidden_size
        output = hidden * spec.o_proj_inputs
        entering = spec.matrix_parameters(hidden) - output
        yield self._product(f"{prefix}input projection", f"{module}.project", side, entering)
        flops, moved, note = spec.state_flops * self.step.length, 2.0 * spec.state_bytes, "read and written once"
        yield self._counted(f"{prefix}state", f"{module}.write_and_read", side, flops, moved, f"{spec.kind}: {note}")
        yield self._product(f"{prefix}output projection", f"{module}.output", "after", output)

    def _feedforward(self) -> Iterator[ModelOperator]:
        layer, hidden, width = self.layer, self.spec.hidden_size, self.layer.intermediate_size
        inputs, first = (2, "gate and up projection") if layer.activation.gated else (1, "up projection")
        gate = ("gate" if layer.activation.gated else "activation", layer.activation.kind)
        if layer.experts is None:
            yield self._product(
                first, "feedforward.first", "after", inputs * width * hidden, f"[{hidden}, {inputs * width}]"
            )
            yield self._plain(gate[0], "feedforward", "after", gate[1])
            yield self._product("down projection", "feedforward.down", "after", width * hidden, f"[{width}, {hidden}]")
            return
        experts, used = layer.experts, layer.experts.num_experts_per_tok
        note = f"{used} of {experts.num_experts} experts a token; bytes are those of one token's experts"
        yield self._product("router", "feedforward.router", "after", experts.num_experts * hidden)
        yield self._product(f"experts' {first}", "feedforward.experts", "after", used * inputs * width * hidden, note)
        yield self._plain(f"experts' {gate[0]}", "feedforward.experts", "after", gate[1])
        yield self._product("experts' down projection", "feedforward.experts", "after", used * width * hidden, note)
        if shared := experts.shared_intermediate_size:
            yield self._product(f"shared expert's {first}", "feedforward.shared", "after", inputs * shared * hidden)
            yield self._plain(f"shared expert's {gate[0]}", "feedforward.shared", "after", gate[1])
            yield self._product("shared expert's down projection", "feedforward.shared", "after", shared * hidden)
        if experts.shared_gate:
            yield self._product("shared expert's weight", "feedforward.shared", "after", hidden)
        yield self._plain("weighted sum of experts", "feedforward", "after")

    def _product(self, name: str, timer: str, side: Side, parameters: int, note: str = "") -> ModelOperator:
        """Return a product with a matrix of `parameters` values, which is read once."""
        moved = parameters * self.values.block
        return self._counted(name, timer, side, 2.0 * self.step.length * parameters, moved, note)

    def _counted(self, name: str, timer: str, side: Side, flops: float, moved: float, note: str = "") -> ModelOperator:
        return ModelOperator(name, f"blocks.{self.index}.{timer}", side, self.index, flops, moved, note)

    def _plain(self, name: str, timer: str, side: Side, note: str = "") -> ModelOperator:
        return ModelOperator(name, f"blocks.{self.index}.{timer}", side, self.index, note=note)


def equal_layers(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Return the layers grouped into sets of layers that are equal, in order of their first layers."""
    found: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        first = next((one for one in found if spec.layers[one] == layer), index)
        found.setdefault(first, []).append(index)
    return tuple(map(tuple, found.values()))


def attention_kind(spec: AnyAttentionSpec) -> str:
    """Describe a layer's attention in a few words."""
    if isinstance(spec, RecurrentSpec):
        return spec.kind.replace("_", " ")
    if isinstance(spec, MLASpec):
        return "latent attention"
    window = f", window {spec.sliding_window}" if spec.sliding_window else ""
    return f"{spec.num_heads} query heads on {spec.num_kv_heads} key/value heads{window}"
