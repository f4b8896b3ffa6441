"""Describe a model's architecture as data: layers, norms, feed-forwards, mixtures of experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.display import Displayable, Table, format_cell, format_ranges
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, RotaryConfig
from workbench.model.recurrent.spec import AnyRecurrentSpec, ParallelRecurrentSpec, RecurrentSpec
from workbench.settings import Settings, non_default_settings

# Settings of the contents and lifetime of a layer's cache; equal in layers that share keys and values.
SHARED_KV_SETTINGS = (
    "num_kv_heads", "head_dim", "sliding_window", "num_sink_tokens", "position", "rotary", "rotated_columns",
)  # fmt: skip


class NormSpec(Settings):
    """A norm of rows: RMSNorm (Zhang and Sennrich, 2019), or `layer`: LayerNorm (Ba et al., 2016)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: Annotated[float, Field(gt=0)] = 1e-5
    weight: bool = True  # False: no weight is multiplied (OLMo, 2024)
    offset: float = 0.0  # added to the weight (Gemma: 1)
    bias: bool = False

    def num_parameters(self, width: int) -> int:
        """Return the number of parameters of one norm of rows of this `width`."""
        return width * (self.weight + self.bias)


class ActivationSpec(Settings):
    """The activation of a feed-forward: `f(gate) up` if gated (Shazeer, 2020), else `f(up)`.

    `gelu_tanh` is GELU by its tanh, `relu2` the square of ReLU, `clamped` g sigmoid(alpha g) (u + 1), g = min(gate,
    limit), u = up within ±limit (gpt-oss, 2025). `xielu` has four learned numbers a layer (Huang and Schlag, 2024).
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped", "xielu"] = "silu"
    gated: bool = True
    alpha: float = 1.702
    limit: Annotated[float, Field(gt=0)] = 7.0
    gate_scale: float = 1.0  # factor of the gate before its activation (Falcon-H1)
    # About this fraction of a token's gates become 0: mean + deviation * normal quantile is subtracted, negative
    # results are 0 (Gemma 3n's Gaussian top-k).
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _possible(self) -> ActivationSpec:
        if self.gate_scale != 1 and (not self.gated or self.kind == "clamped"):
            raise ValueError(f"gate_scale {self.gate_scale} needs a gate that is not clamped")
        if self.sparsity and (not self.gated or self.kind == "clamped"):
            raise ValueError(f"sparsity {self.sparsity} needs a gate that is not clamped")
        if self.kind == "clamped" and not self.gated:
            raise ValueError("clamped needs a gate and an up projection; set gated")
        if self.kind == "xielu" and self.gated:
            raise ValueError("xielu is supported only without a gate; set gated: false")
        return self


class RouterSpec(Settings):
    """The rule that chooses experts and their weights from a router's logits.

    Scores are the logits, their softmax or their sigmoid. The experts with the highest score (plus a learned bias, if
    any) are chosen (DeepSeek-V3, 2024), from only `kept_groups` of `groups` if experts are in groups. Weights are their
    scores: unchanged, divided by their sum with `renormalize`, or the softmax of the chosen with `softmax_chosen`
    (gpt-oss, Granite); all are multiplied by `factor`.

    `sparsemixer` (Liu et al., 2023) chooses one expert after another: the best logit m of those left; its weight is its
    softmax among those left with (m - logit) / max(|logit|, m) of at most 2 `jitter`.
    """

    score: Literal["logit", "softmax", "sigmoid", "sparsemixer"] = "logit"
    jitter: Annotated[float, Field(ge=0)] = 0.01
    softmax_chosen: bool = True
    renormalize: bool = False
    selection_bias: bool = False
    groups: Annotated[int, Field(ge=1)] = 1
    kept_groups: Annotated[int, Field(ge=1)] = 1
    group_score: Literal["max", "top2"] = "max"  # score of a group: its best, or the sum of its two best
    factor: float = 1.0
    weighs_input: bool = False  # weights multiply an expert's input, not its output (Llama 4)


class MoESpec(Settings):
    """A mixture of `num_experts` feed-forwards, of which each token takes `num_experts_per_tok`.

    A shared expert of width `shared_intermediate_size` adds its output for every token, multiplied with `shared_gate`
    by the sigmoid of a further product (Qwen 2 MoE).
    """

    num_experts: Annotated[int, Field(ge=1)]
    num_experts_per_tok: Annotated[int, Field(ge=1)]
    router: RouterSpec = RouterSpec()
    router_bias: bool = False
    shared_intermediate_size: Annotated[int, Field(ge=1)] | None = None
    shared_gate: bool = False
    held: tuple[int, int] | None = None  # the experts [first, end) of this rank (tensor parallelism); None: all

    @model_validator(mode="after")
    def _enough(self) -> MoESpec:
        if self.held is not None and not 0 <= self.held[0] < self.held[1] <= self.num_experts:
            raise ValueError(f"held {self.held}: must be (first, end) within {self.num_experts} experts")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"a token cannot use {self.num_experts_per_tok} experts of {self.num_experts}")
        if self.num_experts % self.router.groups or self.router.kept_groups > self.router.groups:
            message = f"{self.num_experts} experts in {self.router.groups} groups, of which {self.router.kept_groups}"
            raise ValueError(f"{message} are kept: groups must be of equal size, and at most all of them are kept")
        return self

    @property
    def held_experts(self) -> range:
        """Return the indices of the local experts, those that this rank has in memory."""
        return range(*(self.held or (0, self.num_experts)))


class LayerSpec(Settings):
    """One layer: attention, then a feed-forward of width `intermediate_size`, or a mixture of experts.

    Norms are on each part's input (`pre`), its output (`post`, OLMo 2), or both (Gemma 2). Parallel parts both read the
    layer's input, through a common norm or one each (GPT-NeoX), and both results are added.
    """

    attention: AnyAttentionSpec
    intermediate_size: Annotated[int, Field(ge=0)]  # 0: a recurrent layer without a feed-forward (Mamba-2)
    mlp_bias: bool = False
    activation: ActivationSpec = ActivationSpec()
    experts: MoESpec | None = None
    norms: Literal["pre", "post", "both"] = "pre"
    parallel: Literal["no", "one_norm", "two_norms"] = "no"
    beside: ParallelRecurrentSpec | None = None  # a recurrent layer parallel to attention
    feedforward_scale: float = 1.0  # factor of the feed-forward's output (Falcon-H1)

    @model_validator(mode="after")
    def _possible(self) -> LayerSpec:
        if self.beside is not None and (
            not isinstance(self.attention, AttentionSpec) or self.norms != "pre" or self.parallel != "no"
        ):
            raise ValueError("a parallel recurrent layer needs grouped attention, norms: pre and parallel: no")
        if self.beside is not None and self.attention.kv_shared_with is not None:
            raise ValueError("kv_shared_with in a layer with a recurrent part is not supported")
        if self.feedforward_scale != 1 and self.norms != "pre":
            raise ValueError("feedforward_scale with norms after a layer's parts is not supported")
        if (self.activation.gate_scale != 1 or self.activation.sparsity) and self.experts is not None:
            raise ValueError("gate_scale or sparsity in a mixture of experts is not supported")
        if self.parallel != "no" and self.norms != "pre":
            raise ValueError(f"norms {self.norms} with parallel parts: give norms: pre")
        if not self.intermediate_size and (not isinstance(self.attention, RecurrentSpec) or self.norms != "pre"):
            raise ValueError("intermediate_size 0: only a recurrent layer with norms: pre may omit the feed-forward")
        return self

    @property
    def recurrent(self) -> AnyRecurrentSpec | None:
        """Return the layer's recurrent part, in place of attention or parallel to it; None if it has none."""
        if isinstance(self.attention, RecurrentSpec):
            return self.attention
        return None if self.beside is None else self.beside.recurrent

    @property
    def mixers(self) -> tuple[AnyAttentionSpec, ...]:
        """Return the layer's parts that read earlier tokens: attention, and a parallel recurrence."""
        return (self.attention,) if self.beside is None else (self.attention, self.beside.recurrent)

    @property
    def num_norms(self) -> int:
        return 1 if self.parallel == "one_norm" or not self.intermediate_size else 4 if self.norms == "both" else 2

    @property
    def mlp_parameters_per_column(self) -> tuple[int, int]:
        """Return two numbers of feed-forward parameters per column of the hidden size: of all experts, and of one
        token's experts.
        """
        matrices = 3 if self.activation.gated else 2
        one = matrices * self.intermediate_size
        if self.experts is None:
            return one, one
        always = self.experts.num_experts + matrices * (self.experts.shared_intermediate_size or 0)
        always += self.experts.shared_gate
        return len(self.experts.held_experts) * one + always, self.experts.num_experts_per_tok * one + always

    def mlp_vector_parameters(self, hidden_size: int) -> int:
        """Return the number of feed-forward parameters outside of matrices: biases."""
        if not self.intermediate_size:
            return 0
        rows = (2 if self.activation.gated else 1) * self.intermediate_size + hidden_size
        if self.experts is None:
            return rows * self.mlp_bias + 4 * (self.activation.kind == "xielu")
        count, router = self.experts.num_experts, self.experts.router
        biases = len(self.experts.held_experts) * rows * self.mlp_bias
        return biases + count * (self.experts.router_bias + router.selection_bias)


class AltUpSpec(Settings):
    """The sizes of a model with several residual streams; each layer computes the `active` one (AltUp, Baykal et al.,
    2023; Gemma 3n, 2025).

    They come with a residual of rank `low_rank` parallel to attention (LAuReL, Menghani et al., 2024), and with a
    per-layer input of `input_columns` columns, from a table of `input_vocab_size` tokens and from the embedding.
    """

    streams: Annotated[int, Field(ge=2)] = 4
    active: Annotated[int, Field(ge=0)] = 0
    scales_active: bool = True  # scale the active stream before it gates a layer's own input
    low_rank: Annotated[int, Field(ge=1)] = 64
    input_columns: Annotated[int, Field(ge=1)] = 256
    input_vocab_size: Annotated[int, Field(ge=1)] = 262_144

    @model_validator(mode="after")
    def _active_is_a_stream(self) -> AltUpSpec:
        if self.active >= self.streams:
            raise ValueError(f"active {self.active}: must be below streams, {self.streams}")
        return self

    def matrix_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters that the streams add to a layer, in a model of width `hidden_size`."""
        columns = self.streams + 2 * self.low_rank + 2 * self.input_columns
        return hidden_size * columns + self.streams**3 + self.streams**2

    def model_parameters(self, hidden_size: int, layers: int) -> int:
        """Return the number of parameters that the streams add outside of the layers."""
        inputs = layers * self.input_columns * (self.input_vocab_size + hidden_size) + self.input_columns
        return inputs + 2 * (self.streams - 1) * hidden_size**2


class ModelSpec(Displayable, Settings):
    """A model's architecture as data; models with equal specs have the same architecture."""

    name: str
    vocab_size: Annotated[int, Field(ge=1)]
    hidden_size: Annotated[int, Field(ge=1)]
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: Annotated[int, Field(ge=1)]  # maximum number of positions
    rotary: RotaryConfig = RotaryConfig()
    norm: NormSpec = NormSpec()
    learned_positions: Annotated[int, Field(ge=0)] | None = None  # first row of a table of learned positions (GPT-2)
    embedding_norm: bool = False  # normalize the embeddings (BLOOM)
    embedding_scale: float = 1.0  # factor of the embeddings (Gemma: the square root of the hidden size)
    residual_scale: float = 1.0  # factor of each part's addition to the residual (Granite)
    logit_scale: float = 1.0  # factor of the logits (Granite, Cohere)
    altup: AltUpSpec | None = None
    head_bias: bool = False
    final_logit_softcapping: Annotated[float, Field(ge=0)] = 0.0  # softcap of the logits; 0: none
    tie_word_embeddings: bool = False  # the output head has the embedding's weights
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text

    @property
    def kv_cache_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return groups of layer indices that share a page table: layers with equal window, sinks, heads and cache
        width. Layers with recurrent states form the last group; layers that read another layer's keys and values are in
        no group.
        """
        groups: dict[tuple, list[int]] = {}
        recurrent = [index for index, layer in enumerate(self.layers) if layer.recurrent is not None]
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            if isinstance(attention, RecurrentSpec) or attention.kv_shared_with is not None:
                continue
            latent = getattr(attention, "kv_lora_rank", None)  # equal widths may be split into heads differently
            kind = (
                attention.sliding_window,
                attention.num_sink_tokens,
                attention.num_kv_heads,
                attention.head_dim,
                attention.cache_values_per_token,
                latent,
            )
            groups.setdefault(kind, []).append(index)
        return tuple(tuple(indices) for indices in (*groups.values(), recurrent) if indices)

    @model_validator(mode="after")
    def _streams_have_fitting_layers(self) -> ModelSpec:
        for index, layer in enumerate(self.layers if self.altup is not None else ()):
            if layer.norms != "both" or layer.beside is not None or not isinstance(layer.attention, AttentionSpec):
                raise ValueError(f"altup: layer {index} needs grouped attention, and norms: both")
        if self.altup is not None and (self.residual_scale != 1 or self.norm.kind != "rms" or not self.norm.weight):
            raise ValueError(
                "altup is not supported with residual_scale, or with norms other than weighted root-mean-square norms"
            )
        return self

    @model_validator(mode="after")
    def _reads_fitting_keys_and_values(self) -> ModelSpec:
        for index, layer in enumerate(self.layers):
            source = layer.attention.kv_shared_with
            if source is None:
                continue
            message = f"layer {index} reads the keys and values of layer {source}"
            if source >= index:
                raise ValueError(f"{message}, which is not before it")
            own = self.layers[source].attention
            if not isinstance(own, AttentionSpec) or own.kv_shared_with is not None or own.module is not None:
                raise ValueError(f"{message}, which has none of its own to share")
            for name in SHARED_KV_SETTINGS:
                mine, theirs = getattr(layer.attention, name), getattr(own, name)
                if mine != theirs:
                    raise ValueError(f"{message}: its {name} is {mine}, but {theirs} there")
        return self

    @model_validator(mode="after")
    def _factors_for_each_pair(self) -> ModelSpec:
        for index, layer in enumerate(self.layers):
            scaling, pairs = (layer.attention.rotary or self.rotary).scaling, layer.attention.rotary_dim // 2
            if scaling.kind == "dynamic" and pairs == 1:
                raise ValueError(f"layer {index} rotates one pair of columns; dynamic scaling needs two or more")
            given = len(scaling.short_factors), len(scaling.long_factors)
            if scaling.kind == "longrope" and pairs and given != (pairs, pairs):
                raise ValueError(f"layer {index} rotates {pairs} pairs of columns; longrope has factors for {given}")
        return self

    @property
    def residual_columns(self) -> int:
        """Return how many values a token's row has between two layers."""
        if self.altup is None:
            return self.hidden_size
        return self.altup.streams * self.hidden_size + len(self.layers) * self.altup.input_columns

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    def length_class(self, limit: int) -> int:
        """Return the length class of a sequence that may reach `limit` tokens (see `RotaryScaling.length_class`)."""
        own = (layer.attention.rotary or self.rotary for layer in self.layers if layer.attention.rotary_dim)
        return max((rotary.scaling.length_class(limit) for rotary in own), default=0)

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the model, computed from shapes."""
        width, norm = self.hidden_size, self.norm.num_parameters(self.hidden_size)
        total = self.vocab_size * (width * (1 if self.tie_word_embeddings else 2) + self.head_bias)
        total += norm * (1 + self.embedding_norm)
        if self.learned_positions is not None:
            total += (self.max_position_embeddings + self.learned_positions) * width
        for layer in self.layers:
            total += sum(mixer.matrix_parameters(width) + mixer.vector_parameters(width) for mixer in layer.mixers)
            total += width * layer.mlp_parameters_per_column[0] + layer.mlp_vector_parameters(width)
            total += norm * layer.num_norms
        if self.altup is not None:
            each = self.altup.matrix_parameters(width) + 4 * width  # three norms, and the active stream's scale
            total += len(self.layers) * each + self.altup.model_parameters(width, len(self.layers))
        return total

    def _display_table(self) -> Table:
        kinds: list[tuple[LayerSpec, list[int]]] = []
        for index, layer in enumerate(self.layers):
            like = next((indices for kind, indices in kinds if kind == layer), None)
            if like is None:
                kinds.append((layer, [index]))
            else:
                like.append(index)
        rows: list[tuple[str, object]] = [("parameters", self.num_parameters), ("layers", len(self.layers))]
        for kind, indices in kinds:
            where = "each layer" if len(kinds) == 1 else f"layers {format_ranges(indices)}"
            sizes = {name for name, field in type(kind.attention).model_fields.items() if field.is_required()}
            slots = sorted(non_default_settings(kind.attention), key=lambda slot: slot[0] not in sizes)  # sizes first
            attention = [f"{name} {format_cell(value)}" for name, value in slots]
            others = [f"{k} {format_cell(v)}" for k, v in non_default_settings(kind) if not k.startswith("attention.")]
            rows.append((where, f"{kind.attention.kind} attention: {', '.join(attention)}; {', '.join(others)}"))
        rows += [(name, value) for name, value in non_default_settings(self) if name not in ("name", "layers")]
        return Table(self.name, rows)
