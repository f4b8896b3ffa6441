"""One layer's attention as data: grouped, or multi-head latent attention, and the rotary embedding of its heads."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from workbench.model.recurrent.spec import AnyRecurrentSpec
from workbench.request import CustomPartSetting
from workbench.settings import Count, NonNegative, Settings


class RotaryScaling(Settings):
    """The scaling of rotary frequencies for contexts longer than the trained one.

    `linear` divides all of them by `factor`; `llama3` (Llama 3.1) divides only the slow ones, with a smooth passage
    between the wavelengths `original_max_position_embeddings / high_freq_factor` and `original_max_position_embeddings
    / low_freq_factor`; `yarn` (Peng et al., 2023) divides those with fewer than `beta_slow` turns in the original
    context, keeps those with more than `beta_fast`, and multiplies cosines and sines by `attention_factor`.

    Two kinds look at the length that a sequence may reach, `L = prompt + max_tokens`. `longrope` (Ding et al., 2024)
    divides frequency i by `short_factors[i]`, or by `long_factors[i]` where L exceeds the original context; `dynamic`
    (NTK-aware) raises the base there to `base (factor L / original - (factor - 1)) ^ (dim / (dim - 2))`. L is each
    sequence's own, so that it does not depend on the batch; transformers takes the longest text of a batch so far.
    """

    # How frequencies change beyond the trained context; default: not at all.
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = "default"
    factor: Annotated[float, Field(gt=0)] = 1.0
    low_freq_factor: float = 1.0  # llama3: wavelengths longer than the context over this are divided
    high_freq_factor: float = 4.0  # llama3: wavelengths shorter than the context over this are kept
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    truncate: bool = True  # yarn's passage begins and ends at whole pairs
    attention_factor: Annotated[float, Field(gt=0)] = 1.0
    original_max_position_embeddings: int = 8192  # tokens of the trained context
    short_factors: tuple[Annotated[float, Field(gt=0)], ...] = ()  # longrope: divisor of each pair's frequency
    long_factors: tuple[Annotated[float, Field(gt=0)], ...] = ()  # longrope: likewise, of long sequences
    long_attention_factor: Annotated[float, Field(gt=0)] | None = None  # of long sequences; None: `attention_factor`

    @property
    def by_length(self) -> bool:
        """Return whether angles depend on the length that a sequence may reach."""
        return self.kind in ("longrope", "dynamic")

    def length_class(self, limit: int) -> int:
        """Return a number that sequences with equal angles share: keys of others cannot take the place of theirs.

        Args:
            limit: the tokens that a sequence may reach.
        """
        if not self.by_length or limit <= self.original_max_position_embeddings:
            return 0
        return 1 if self.kind == "longrope" else limit


class RotaryConfig(Settings):
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0  # base of the frequencies
    scaling: RotaryScaling = RotaryScaling()


class QKNormSpec(Settings):
    """The norm of queries and keys: of the kind, eps and offset of the model's norms.

    Each head is normed by itself, or all columns of the projection together (OLMo 2). Heads share their weights, or
    each has its own (Cohere), or there are none (Llama 4).
    """

    over: Literal["head", "projection"] = "head"
    weight: Literal["shared", "per_head", "none"] = "shared"
    bias: bool = False
    after_rotary: bool = False


def _qk_norm(value: object) -> object:
    """Accept true for a norm of each head, false for none."""
    return QKNormSpec() if value is True else None if value is False else value


class QueryTemperature(Settings):
    """A factor of late queries' scores: 1 + `strength` log(1 + floor((position + `offset`) / `floor`)) (Llama 4, 2025;
    after Nakanishi, 2025)."""

    strength: Annotated[float, Field(gt=0)]
    floor: Count  # in tokens
    offset: NonNegative = 0


class AttentionSlots(Settings):
    """Slots that grouped attention and multi-head latent attention share."""

    num_heads: Count  # query heads; a trained model's are what they are
    sliding_window: Count | None = None  # tokens that a query sees, itself included; None: all
    num_sink_tokens: NonNegative = 0  # first tokens that every query sees, beside its window
    # scores stay within +- this: cap * tanh(score / cap); 0 is off
    softcap: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    # scores are multiplied by it; usually 1 / sqrt of the columns of a query
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    rotary: RotaryConfig | None = None  # how heads are rotated by position; None is the model's
    mask: CustomPartSetting | None = None  # user-defined: which keys a query sees
    score: CustomPartSetting | None = None  # user-defined: changes the scores before softmax
    qkv_bias: bool = False  # on the projections of queries, keys and values, or to the latents
    o_proj_bias: bool = False

    @model_validator(mode="after")
    def _sinks_are_outside(self) -> Self:
        if self.num_sink_tokens and self.sliding_window is None:
            raise ValueError(f"num_sink_tokens {self.num_sink_tokens} without a window: all tokens are in sight")
        return self


class AttentionSpec(AttentionSlots):
    """One layer's attention as slots: `num_heads` query heads read `num_kv_heads` key/value heads of width `head_dim`.

    scores = scale q k, capped, changed by `score`; keys outside `mask` and the window are not seen; `sink_logits` adds
    one learned logit a head to the softmax's sum (gpt-oss, 2025).
    """

    kind: Literal["grouped"] = "grouped"
    num_kv_heads: Count
    head_dim: Annotated[int, Field(ge=2)]  # numbers of a head; a trained model's are what they are
    chunk_size: Count | None = None  # a query sees its own chunk of so many tokens alone (Llama 4)
    temperature: QueryTemperature | None = None  # queries are scaled by their position, for long contexts
    qk_norm: Annotated[QKNormSpec | None, BeforeValidator(_qk_norm)] = None  # of queries and keys (Qwen 3, Gemma 3)
    value_norm: bool = False  # each head's values are normed, without weights (Gemma 3n)
    qkv_clip: Annotated[float, Field(ge=0)] = 0.0  # normed queries and keys, and values, are clamped to it (OLMo)
    position: Literal["rotary", "alibi", "none"] = "rotary"  # how attention knows where tokens are
    rotated_columns: Annotated[int, Field(ge=2, multiple_of=2)] | None = None  # of head_dim (GPT-NeoX); None: all
    sink_logits: bool = False  # a learned logit for each head that takes probability from all tokens
    pages: CustomPartSetting | None = None  # user-defined: which pages of the cache a decode reads
    module: CustomPartSetting | None = None  # user-defined, in place of the layer's attention
    output_gate: bool = False  # its result is multiplied by the sigmoid of another projection (Qwen 3 Next)
    # The earlier layer whose keys and values are read in place of its own (Brandon et al., 2024; Gemma 3n).
    kv_shared_with: NonNegative | None = None

    @model_validator(mode="after")
    def _grouped(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.qkv_clip and self.qk_norm is not None and self.qk_norm.after_rotary:
            raise ValueError("qkv_clip beside norms after rotary: their order is not carried out")
        if self.chunk_size is not None and self.sliding_window is not None:
            raise ValueError(f"chunk_size {self.chunk_size} beside a sliding window: a layer has one of them")
        if self.temperature is not None and self.softcap:
            raise ValueError("temperature beside softcap: a factor of the capped scores is not one of the queries")
        if self.value_norm and (self.output_gate or self.kv_shared_with is not None):
            raise ValueError("value_norm beside output_gate, or of another layer's values, is not carried out")
        if self.kv_shared_with is not None and (self.module is not None or self.output_gate):
            what = "a custom attention module" if self.module is not None else "output_gate"
            raise ValueError(f"kv_shared_with beside {what} is not carried out")
        if self.pages is not None and (self.sliding_window or self.chunk_size or self.kv_shared_with is not None):
            what = "a sliding window" if self.sliding_window else "chunk_size" if self.chunk_size else "kv_shared_with"
            raise ValueError(f"pages beside {what} is not carried out: pages are chosen of the whole text of a layer")
        if self.rotated_columns is not None and (self.rotated_columns > self.head_dim or self.head_dim % 2):
            raise ValueError(
                f"rotated_columns {self.rotated_columns} of {self.head_dim}: even numbers, and at most all"
            )
        return self

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_own_kv_heads(self) -> int:
        """Return the key/value heads that it projects and caches itself."""
        return self.num_kv_heads if self.kv_shared_with is None else 0

    @property
    def cache_values_per_token(self) -> int:
        """Return how many numbers a token leaves in the cache."""
        return 2 * self.num_own_kv_heads * self.head_dim

    @property
    def cache_values_read(self) -> int:
        """Return how many numbers of the cache are read of a token that a query sees."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Return the columns of a head that rotary rotates."""
        return (self.rotated_columns or self.head_dim) if self.position == "rotary" else 0

    @property
    def o_proj_inputs(self) -> int:
        """Return the columns that the output projection reads."""
        return self.num_heads * self.head_dim

    @property
    def qk_norm_parameters(self) -> tuple[int, int]:
        """Return the weights of the norms of queries and of keys."""
        if self.qk_norm is None or self.qk_norm.weight == "none":
            return 0, 0
        if self.qk_norm.over == "head" and self.qk_norm.weight == "shared":
            return self.head_dim, self.head_dim * (self.kv_shared_with is None)
        return self.num_heads * self.head_dim, self.num_own_kv_heads * self.head_dim

    def matrix_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters in its matrices, in a model of that width."""
        return hidden_size * (self.num_projected_heads + self.num_heads) * self.head_dim

    @property
    def num_projected_heads(self) -> int:
        """Return the heads of the fused projection: queries, their gates where it has such, keys, values."""
        return (1 + self.output_gate) * self.num_heads + 2 * self.num_own_kv_heads

    def vector_parameters(self, hidden_size: int) -> int:
        """Return the number of its other parameters: biases, norms, sink logits."""
        biases = self.num_projected_heads * self.head_dim * self.qkv_bias + hidden_size * self.o_proj_bias
        norms = sum(self.qk_norm_parameters) * (2 if self.qk_norm is not None and self.qk_norm.bias else 1)
        return biases + norms + self.num_heads * self.sink_logits


class MLASpec(AttentionSlots):
    """The sizes of multi-head latent attention (DeepSeek-V2, 2024). A token leaves `kv_lora_rank` numbers in the
    cache, from which every head's key and value are made, and one key of width `qk_rope_head_dim`, rotated by its
    position, that all heads share.

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
    rms_norm_eps: float = 1e-6  # of the norms of both latents

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
        """Return None: no custom module replaces it."""

    @property
    def kv_shared_with(self) -> None:
        """Return None: it caches its own latents."""

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
    def cache_values_read(self) -> int:
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


AnyAttentionSpec = Annotated[AttentionSpec | MLASpec | AnyRecurrentSpec, Field(discriminator="kind")]
