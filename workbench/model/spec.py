"""A model's architecture as data: layers, attention (also multi-head latent attention), rotary embedding, mixture of
experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.display import Displayable, Table, format_cell, format_ranges
from workbench.request import CustomPart
from workbench.settings import Settings, non_default_settings


class RotaryScaling(Settings):
    """The scaling of rotary frequencies for contexts longer than the trained one.

    `linear` divides all of them by `factor`; `llama3` (Llama 3.1) divides only the slow ones, with a smooth passage
    between the wavelengths `original_max_position_embeddings / high_freq_factor` and `original_max_position_embeddings
    / low_freq_factor`; `yarn` (Peng et al., 2023) divides those with fewer than `beta_slow` turns in the original
    context, keeps those with more than `beta_fast`, and multiplies cosines and sines by `attention_factor`.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: Annotated[float, Field(gt=0)] = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    truncate: bool = True  # yarn's passage begins and ends at whole pairs
    attention_factor: Annotated[float, Field(gt=0)] = 1.0
    original_max_position_embeddings: int = 8192


class RotaryConfig(Settings):
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    scaling: RotaryScaling = RotaryScaling()


class MLASpec(Settings):
    """The sizes of multi-head latent attention (DeepSeek-V2, 2024). A token leaves `kv_lora_rank` numbers in the
    cache, from which every head's key and value are made, and one key of width `qk_rope_head_dim`, rotated by its
    position, that all heads share.

    A head's query and key have `qk_nope_head_dim` columns without rotary, then `qk_rope_head_dim` rotated ones;
    its value has `v_head_dim`. With `q_lora_rank` queries are made from that many numbers. `rope_interleave` pairs are
    the columns 2i and 2i + 1, others i and i + qk_rope_head_dim / 2.
    """

    kind: Literal["mla"] = "mla"
    num_heads: Annotated[int, Field(ge=1)]
    kv_lora_rank: Annotated[int, Field(ge=1)]
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    qk_nope_head_dim: Annotated[int, Field(ge=1)]
    v_head_dim: Annotated[int, Field(ge=1)]
    q_lora_rank: Annotated[int, Field(ge=1)] | None = None
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    num_sink_tokens: Annotated[int, Field(ge=0)] = 0
    softcap: Annotated[float, Field(ge=0)] = 0.0
    scale: Annotated[float, Field(gt=0)] | None = (
        None  # of the scores; None is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
    )
    rotary: RotaryConfig | None = None  # None is the model's
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6  # of the norms of both latents
    mask: CustomPart | None = None  # custom, as in AttentionSpec
    score: CustomPart | None = None
    qkv_bias: bool = False  # on the projections to the latents
    o_proj_bias: bool = False

    @model_validator(mode="after")
    def _possible(self) -> MLASpec:
        if self.num_sink_tokens and self.sliding_window is None:
            raise ValueError(f"num_sink_tokens {self.num_sink_tokens} without a window: all tokens are in sight")
        if self.qkv_bias and self.q_lora_rank is None:
            raise ValueError("qkv_bias without q_lora_rank: queries that come from no latent have no bias")
        return self

    @property
    def sink_logits(self) -> Literal[False]:
        return False

    @property
    def position(self) -> Literal["rotary"]:
        return "rotary"

    @property
    def module(self) -> None:
        """Return None: no custom module replaces it."""

    @property
    def num_kv_heads(self) -> int:
        """Return 1: one cached head, which all query heads read."""
        return 1

    @property
    def head_dim(self) -> int:
        """Return the width of the cached head: the latent, whose columns are the values, and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads

    @property
    def cache_values_per_token(self) -> int:
        """Return the numbers that a token leaves in the cache: values are columns of the keys."""
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def o_proj_inputs(self) -> int:
        """Return the columns that the output projection reads."""
        return self.num_heads * self.v_head_dim

    @property
    def query_columns(self) -> int:
        """Return the columns of all heads' queries before they are absorbed."""
        return self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def down_proj_columns(self) -> int:
        """Return the columns of the fused projection from the model's width: queries or their latent, then the cached
        head."""
        return (self.q_lora_rank or self.query_columns) + self.head_dim

    def matrix_parameters(self, width: int) -> int:
        """Return the number of parameters in its matrices, in a model of that width."""
        up = (
            self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
            + (self.q_lora_rank or 0) * self.query_columns
        )
        return width * (self.down_proj_columns + self.o_proj_inputs) + up

    def vector_parameters(self, width: int) -> int:
        """Return the number of its other parameters: biases and norms."""
        return (
            self.down_proj_columns * self.qkv_bias
            + width * self.o_proj_bias
            + self.kv_lora_rank
            + (self.q_lora_rank or 0)
        )


class AttentionSpec(Settings):
    """One layer's attention as slots: `num_heads` query heads read `num_kv_heads` key/value heads of width `head_dim`.

    scores = scale q k, capped, changed by `score`; keys outside `mask` and the window are not seen; `sink_logits` adds
    one learned logit a head to the softmax's sum (gpt-oss, 2025).
    """

    kind: Literal["grouped"] = "grouped"
    num_heads: Annotated[int, Field(ge=1)]
    num_kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=2)]
    sliding_window: Annotated[int, Field(ge=1)] | None = None  # in tokens; None sees the whole context
    num_sink_tokens: Annotated[int, Field(ge=0)] = 0  # first tokens that a window keeps in sight (StreamingLLM, 2023)
    softcap: Annotated[float, Field(ge=0)] = 0.0  # c tanh(score / c) (Gemma 2, 2024); 0 is none
    scale: Annotated[float, Field(gt=0)] | None = None  # of the scores; None is dim ** -0.5
    qk_norm: bool = False  # root-mean-square norm of each query and key head before rotary (Qwen 3, Gemma 3)
    position: Literal["rotary", "alibi", "none"] = "rotary"
    rotary: RotaryConfig | None = None  # None is the model's
    sink_logits: bool = False
    mask: CustomPart | None = None  # custom: (query, key) positions -> seen
    score: CustomPart | None = None  # custom: (score, head, query, key) -> score
    module: CustomPart | None = None  # custom attention module
    qkv_bias: bool = False  # on the query, key and value projections
    o_proj_bias: bool = False

    @model_validator(mode="after")
    def _grouped(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.num_sink_tokens and self.sliding_window is None:
            raise ValueError(f"num_sink_tokens {self.num_sink_tokens} without a window: all tokens are in sight")
        return self

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def cache_values_per_token(self) -> int:
        """Return how many numbers a token leaves in the cache."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Return the columns of a head that rotary rotates."""
        return self.head_dim if self.position == "rotary" else 0

    @property
    def o_proj_inputs(self) -> int:
        """Return the columns that the output projection reads."""
        return self.num_heads * self.head_dim

    def matrix_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters in its matrices, in a model of that width."""
        return hidden_size * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def vector_parameters(self, hidden_size: int) -> int:
        """Return the number of its other parameters: biases, norms, sink logits."""
        biases = (
            self.num_heads + 2 * self.num_kv_heads
        ) * self.head_dim * self.qkv_bias + hidden_size * self.o_proj_bias
        return biases + 2 * self.head_dim * self.qk_norm + self.num_heads * self.sink_logits


AnyAttentionSpec = Annotated[AttentionSpec | MLASpec, Field(discriminator="kind")]


class GateSpec(Settings):
    """The function that joins the two halves of a gated feed-forward: silu(gate) up (Shazeer, 2020), gelu(gate) up
    with the tanh form (Gemma), or `clamped`: g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up within ±limit
    (gpt-oss, 2025)."""

    kind: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    alpha: float = 1.702
    limit: Annotated[float, Field(gt=0)] = 7.0


class MoESpec(Settings):
    """A mixture of `num_experts` feed-forwards: each token takes the `num_experts_per_tok` of highest score, by the
    softmax of these."""

    num_experts: Annotated[int, Field(ge=1)]
    num_experts_per_tok: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _enough(self) -> MoESpec:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"a token cannot use {self.num_experts_per_tok} experts of {self.num_experts}")
        return self


class LayerSpec(Settings):
    """One layer: attention, then a gated feed-forward of width `intermediate_size`, or a mixture of such."""

    attention: AnyAttentionSpec
    intermediate_size: Annotated[int, Field(ge=1)]
    mlp_bias: bool = False
    gate: GateSpec = GateSpec()
    experts: MoESpec | None = None
    post_norms: bool = False  # what attention and feed-forward give is normed before it is added (Gemma 2)

    @property
    def mlp_parameters_per_column(self) -> tuple[int, int]:
        """Return the parameters of feed-forward matrices for each column of the hidden size: of all experts, and of
        those a token uses."""
        one = 3 * self.intermediate_size
        if self.experts is None:
            return one, one
        router = self.experts.num_experts
        return self.experts.num_experts * one + router, self.experts.num_experts_per_tok * one + router


class ModelSpec(Displayable, Settings):
    """A model's architecture as data. Two specs that are equal are the same architecture."""

    name: str
    vocab_size: Annotated[int, Field(ge=1)]
    hidden_size: Annotated[int, Field(ge=1)]
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: Annotated[int, Field(ge=1)]  # positions the model was made for
    rotary: RotaryConfig = RotaryConfig()
    rms_norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the norms' weights (Gemma: 1)
    embedding_scale: float = 1.0  # Gemma: the square root of the width
    final_logit_softcapping: Annotated[float, Field(ge=0)] = 0.0  # of the logits; 0 is none
    tie_word_embeddings: bool = False  # the output head is the embedding
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text

    @property
    def kv_cache_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return layer indices that share a page table: same window and sinks, heads and width of the cache."""
        groups: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            latent = getattr(attention, "kv_lora_rank", None)  # two may be as wide and be parted otherwise
            kind = (
                attention.sliding_window,
                attention.num_sink_tokens,
                attention.num_kv_heads,
                attention.head_dim,
                attention.cache_values_per_token,
                latent,
            )
            groups.setdefault(kind, []).append(index)
        return tuple(tuple(indices) for indices in groups.values())

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters, from the shapes alone."""
        total = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.hidden_size
        for layer in self.layers:
            experts = 1 if layer.experts is None else layer.experts.num_experts
            total += (
                layer.attention.matrix_parameters(self.hidden_size)
                + self.hidden_size * layer.mlp_parameters_per_column[0]
            )
            total += layer.attention.vector_parameters(self.hidden_size) + self.hidden_size * (
                4 if layer.post_norms else 2
            )
            router = 0 if layer.experts is None else experts
            total += (experts * (2 * layer.intermediate_size + self.hidden_size) + router) * layer.mlp_bias
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
            attention = [f"{name} {format_cell(value)}" for name, value in non_default_settings(kind.attention)]
            others = [f"{k} {format_cell(v)}" for k, v in non_default_settings(kind) if not k.startswith("attention.")]
            rows.append((where, f"{kind.attention.kind} attention: {', '.join(attention)}; {', '.join(others)}"))
        rows += [(name, value) for name, value in non_default_settings(self) if name not in ("name", "layers")]
        return Table(self.name, rows)
