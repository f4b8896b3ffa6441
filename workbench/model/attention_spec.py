"""Describe one layer's attention as data: grouped or multi-head latent attention, and the rotary embedding of its
heads.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from workbench.model.recurrent.spec import AnyRecurrentSpec
from workbench.request import CustomPartSetting
from workbench.settings import Count, NonNegative, Settings


class RotaryScaling(Settings):
    """A scaling of rotary frequencies for contexts longer than the trained one.

    `linear` divides all of them by `factor`; `llama3` (Llama 3.1) divides only the slow ones, with a smooth passage
    between the wavelengths `original_max_position_embeddings / high_freq_factor` and `original_max_position_embeddings
    / low_freq_factor`; `yarn` (Peng et al., 2023) divides those with fewer than `beta_slow` turns in the original
    context, keeps those with more than `beta_fast`, and multiplies cosines and sines by `attention_factor`.

    Two kinds depend on the length that a sequence may reach, `L = prompt + max_tokens`. `longrope` (Ding et al., 2024)
    divides frequency i by `short_factors[i]`, or by `long_factors[i]` where L exceeds the original context; `dynamic`
    (NTK-aware) raises the base there to `base (factor L / original - (factor - 1)) ^ (dim / (dim - 2))`. L belongs to
    each sequence, so results do not depend on the batch; transformers uses the longest text of the batch so far.
    """

    # How frequencies are changed for long contexts; default: unchanged.
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = "default"
    factor: Annotated[float, Field(gt=0)] = 1.0
    low_freq_factor: float = 1.0  # llama3: wavelengths longer than the context over this are divided
    high_freq_factor: float = 4.0  # llama3: wavelengths shorter than the context over this are kept
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    truncate: bool = True  # yarn: round the ends of its ramp to whole pairs of columns
    attention_factor: Annotated[float, Field(gt=0)] = 1.0
    original_max_position_embeddings: int = 8192  # tokens of the trained context
    short_factors: tuple[Annotated[float, Field(gt=0)], ...] = ()  # longrope: divisor of each pair's frequency
    long_factors: tuple[Annotated[float, Field(gt=0)], ...] = ()  # longrope: divisors in long sequences
    long_attention_factor: Annotated[float, Field(gt=0)] | None = None  # for long sequences; None: `attention_factor`

    @property
    def by_length(self) -> bool:
        """Return whether a token's angles depend on the length that its sequence may reach."""
        return self.kind in ("longrope", "dynamic")

    def length_class(self, limit: int) -> int:
        """Return a number that is equal for sequences with equal angles: only sequences of the same class can share
        cached keys.

        Args:
            limit: maximum number of tokens of the sequence.
        """
        if not self.by_length or limit <= self.original_max_position_embeddings:
            return 0
        return 1 if self.kind == "longrope" else limit


class RotaryConfig(Settings):
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0  # base of the frequencies
    scaling: RotaryScaling = RotaryScaling()


class QKNormSpec(Settings):
    """The norm of queries and keys, with the kind, eps and offset of the model's norms.

    Each head is normalized separately, or all columns of the projection together (OLMo 2). Heads share weights, each
    has its own (Cohere), or there are none (Llama 4).
    """

    over: Literal["head", "projection"] = "head"
    weight: Literal["shared", "per_head", "none"] = "shared"
    bias: bool = False
    after_rotary: bool = False


def _qk_norm(value: object) -> object:
    """Accept true for a norm of each head, false for none."""
    return QKNormSpec() if value is True else None if value is False else value


class QueryTemperature(Settings):
    """A temperature for the scores of late queries: they are multiplied by 1 + `strength` log(1 + floor((position +
    `offset`) / `floor`)) (Llama 4, 2025; after Nakanishi, 2025)."""

    strength: Annotated[float, Field(gt=0)]
    floor: Count  # number of tokens that share a temperature
    offset: NonNegative = 0


class AttentionSlots(Settings):
    """Settings that grouped attention and multi-head latent attention share."""

    num_heads: Count  # query heads; fixed in a trained model
    sliding_window: Count | None = None  # tokens that a query sees, itself included; None: all
    num_sink_tokens: NonNegative = 0  # first tokens that every query sees in addition to its window
    # scores stay within +- this: cap * tanh(score / cap); 0 is off
    softcap: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    # factor of the scores; usually 1 / sqrt of the columns of a query
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    rotary: RotaryConfig | None = None  # rotary embedding of heads; None: the model's
    mask: CustomPartSetting | None = None  # user-defined mask: the keys that a query sees
    score: CustomPartSetting | None = None  # user-defined: changes the scores before softmax
    qkv_bias: bool = False  # biases on the projections to queries, keys and values; with MLA, to the latents
    o_proj_bias: bool = False

    @model_validator(mode="after")
    def _sinks_are_outside(self) -> Self:
        if self.num_sink_tokens and self.sliding_window is None:
            raise ValueError(f"num_sink_tokens {self.num_sink_tokens} without a window: all tokens are in sight")
        return self


class AttentionSpec(AttentionSlots):
    """The settings of one layer's attention: `num_heads` query heads read `num_kv_heads` key/value heads of width
    `head_dim`.

    scores = scale q k, capped, changed by `score`; keys outside `mask` and the window are not seen; `sink_logits` adds
    one learned logit a head to the softmax's sum (gpt-oss, 2025).
    """

    kind: Literal["grouped"] = "grouped"
    num_kv_heads: Count
    head_dim: Annotated[int, Field(ge=2)]  # numbers of a head; fixed in a trained model
    chunk_size: Count | None = None  # tokens of a chunk; a query sees only its own chunk (Llama 4)
    temperature: QueryTemperature | None = None  # queries are scaled by their position, for long contexts
    qk_norm: Annotated[QKNormSpec | None, BeforeValidator(_qk_norm)] = (
        None  # norm of queries and keys (Qwen 3, Gemma 3)
    )
    value_norm: bool = False  # each head's values are normed, without weights (Gemma 3n)
    qkv_clip: Annotated[float, Field(ge=0)] = 0.0  # normed queries and keys, and values, are clamped to it (OLMo)
    position: Literal["rotary", "alibi", "none"] = "rotary"  # how attention encodes positions
    rotated_columns: Annotated[int, Field(ge=2, multiple_of=2)] | None = None  # of a head; None: all (GPT-NeoX)
    sink_logits: bool = False  # a learned logit for each head that takes probability from all tokens
    pages: CustomPartSetting | None = None  # user-defined selection of the pages that a decode reads
    module: CustomPartSetting | None = None  # user-defined, in place of the layer's attention
    output_gate: bool = False  # multiply the output by the sigmoid of another projection (Qwen 3 Next)
    # The earlier layer with the keys and values that this layer reads (Brandon et al., 2024; Gemma 3n).
    kv_shared_with: NonNegative | None = None

    @model_validator(mode="after")
    def _grouped(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.qkv_clip and self.qk_norm is not None and self.qk_norm.after_rotary:
            raise ValueError("qkv_clip with norms after rotary: this order is not supported")
        if self.chunk_size is not None and self.sliding_window is not None:
            raise ValueError(f"chunk_size {self.chunk_size} with a sliding window: give one of them")
        if self.temperature is not None and self.softcap:
            raise ValueError("temperature with softcap is not supported; give one")
        if self.value_norm and (self.output_gate or self.kv_shared_with is not None):
            raise ValueError("value_norm with output_gate, or with another layer's values, is not supported")
        if self.kv_shared_with is not None and (self.module is not None or self.output_gate):
            what = "a custom attention module" if self.module is not None else "output_gate"
            raise ValueError(f"kv_shared_with with {what} is not supported")
        if self.pages is not None and (self.sliding_window or self.chunk_size or self.kv_shared_with is not None):
            what = "a sliding window" if self.sliding_window else "chunk_size" if self.chunk_size else "kv_shared_with"
            raise ValueError(f"pages with {what} is not supported: a layer chooses pages from the whole text")
        if self.rotated_columns is not None and (self.rotated_columns > self.head_dim or self.head_dim % 2):
            raise ValueError(
                f"rotated_columns {self.rotated_columns} of {self.head_dim}: give an even number, at most head_dim"
            )
        return self

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_own_kv_heads(self) -> int:
        """Return the number of key/value heads that the layer itself projects and caches."""
        return self.num_kv_heads if self.kv_shared_with is None else 0

    @property
    def cache_values_per_token(self) -> int:
        """Return the number of values that a token stores in the cache."""
        return 2 * self.num_own_kv_heads * self.head_dim

    @property
    def cache_values_read(self) -> int:
        """Return the number of cached values that a query reads for each visible token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Return the number of a head's columns that the rotary embedding rotates; 0 without it."""
        return (self.rotated_columns or self.head_dim) if self.position == "rotary" else 0

    @property
    def o_proj_inputs(self) -> int:
        """Return the number of columns that the output projection reads."""
        return self.num_heads * self.head_dim

    @property
    def qk_norm_parameters(self) -> tuple[int, int]:
        """Return the number of weights in the norm of queries, and in the norm of keys."""
        if self.qk_norm is None or self.qk_norm.weight == "none":
            return 0, 0
        if self.qk_norm.over == "head" and self.qk_norm.weight == "shared":
            return self.head_dim, self.head_dim * (self.kv_shared_with is None)
        return self.num_heads * self.head_dim, self.num_own_kv_heads * self.head_dim

    def matrix_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters in the layer's attention matrices, in a model of width `hidden_size`."""
        return hidden_size * (self.num_projected_heads + self.num_heads) * self.head_dim

    @property
    def num_projected_heads(self) -> int:
        """Return the number of heads in the fused projection: queries, their gates (if any), keys, values."""
        return (1 + self.output_gate) * self.num_heads + 2 * self.num_own_kv_heads

    def vector_parameters(self, hidden_size: int) -> int:
        """Return the number of attention parameters outside of matrices: biases, norms, sink logits."""
        biases = self.num_projected_heads * self.head_dim * self.qkv_bias + hidden_size * self.o_proj_bias
        norms = sum(self.qk_norm_parameters) * (2 if self.qk_norm is not None and self.qk_norm.bias else 1)
        return biases + norms + self.num_heads * self.sink_logits


class MLASpec(AttentionSlots):
    """The sizes of multi-head latent attention (DeepSeek-V2, 2024). For each token the cache stores `kv_lora_rank`
    numbers, from which every head's key and value are made, and one key of width `qk_rope_head_dim`, rotated by its
    position, which all heads share.

    A head's query and key have `qk_nope_head_dim` columns without rotary, then `qk_rope_head_dim` rotated ones;
    its value has `v_head_dim`. With `q_lora_rank` queries are made from that many numbers. `rope_interleave` pairs are
    the columns 2i and 2i + 1, others i and i + qk_rope_head_dim / 2.
    """

    kind: Literal["mla"] = "mla"
    kv_lora_rank: Count
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    qk_nope_head_dim: Count
    v_head_dim: Count
    q_lora_rank: Count | None = None
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6  # eps of the norms of both latents

    @model_validator(mode="after")
    def _possible(self) -> MLASpec:
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
        """Return None: no custom module replaces this attention."""

    @property
    def kv_shared_with(self) -> None:
        """Return None: the layer caches its own latents."""

    @property
    def num_kv_heads(self) -> int:
        """Return 1: the cache has one head, which all query heads read."""
        return 1

    @property
    def head_dim(self) -> int:
        """Return the width of the cached head: the latent, whose columns are the values, plus the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads

    @property
    def cache_values_per_token(self) -> int:
        """Return the number of values that a token stores in the cache; values of attention are columns of the keys,
        not stored again.
        """
        return self.head_dim

    @property
    def cache_values_read(self) -> int:
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def o_proj_inputs(self) -> int:
        """Return the number of columns that the output projection reads."""
        return self.num_heads * self.v_head_dim

    @property
    def query_columns(self) -> int:
        """Return the number of columns of all heads' queries before they are absorbed."""
        return self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def down_proj_columns(self) -> int:
        """Return the number of output columns of the fused projection of hidden states: the queries or their latent,
        then the cached head."""
        return (self.q_lora_rank or self.query_columns) + self.head_dim

    def matrix_parameters(self, width: int) -> int:
        """Return the number of parameters in the layer's attention matrices, in a model of this `width`."""
        up = (
            self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
            + (self.q_lora_rank or 0) * self.query_columns
        )
        return width * (self.down_proj_columns + self.o_proj_inputs) + up

    def vector_parameters(self, width: int) -> int:
        """Return the number of attention parameters outside of matrices: biases and norms."""
        return (
            self.down_proj_columns * self.qkv_bias
            + width * self.o_proj_bias
            + self.kv_lora_rank
            + (self.q_lora_rank or 0)
        )


AnyAttentionSpec = Annotated[AttentionSpec | MLASpec | AnyRecurrentSpec, Field(discriminator="kind")]
