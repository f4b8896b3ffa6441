"""Multi-head latent attention as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.model.rotary_spec import RotaryConfig, FrozenModel
from workbench.request import CustomPart


class MLASpec(FrozenModel):
    """The sizes of multi-head latent attention (DeepSeek-V2, 2024). A token leaves `kv_lora_rank` numbers in the
    cache, from which every head's key and value are made, and one key of width `qk_rope_head_dim`, rotated by its
    position, that all heads share.

    A head's query and key have `qk_nope_head_dim` columns without rotary, then `qk_rope_head_dim` rotated ones;
    its value has `v_head_dim`. With `q_lora_rank` queries are made from that many numbers. `rope_interleave` pairs are
    the columns 2i and 2i + 1, others i and i + qk_rope_head_dim / 2.
    """

    kind: Literal["latent"] = "latent"
    num_heads: Annotated[int, Field(ge=1)]
    kv_lora_rank: Annotated[int, Field(ge=1)]
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    qk_nope_head_dim: Annotated[int, Field(ge=1)]
    v_head_dim: Annotated[int, Field(ge=1)]
    q_lora_rank: Annotated[int, Field(ge=1)] | None = None
    window: Annotated[int, Field(ge=1)] | None = None
    sinks: Annotated[int, Field(ge=0)] = 0
    softcap: Annotated[float, Field(ge=0)] = 0.0
    scale: Annotated[float, Field(gt=0)] | None = None  # of the scores; None is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
    rotary: RotaryConfig | None = None  # None is the model's
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6  # of the norms of both latents
    mask: CustomPart | None = None  # custom, as in AttentionSpec
    score: CustomPart | None = None
    qkv_bias: bool = False  # on the projections to the latents
    o_proj_bias: bool = False

    @model_validator(mode="after")
    def _possible(self) -> MLASpec:
        if self.sinks and self.window is None:
            raise ValueError(f"sinks {self.sinks} without a window: the whole context is in sight already")
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
        up = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim) + (self.q_lora_rank or 0) * self.query_columns
        return width * (self.down_proj_columns + self.o_proj_inputs) + up

    def vector_parameters(self, width: int) -> int:
        """Return the number of its other parameters: biases and norms."""
        return self.down_proj_columns * self.qkv_bias + width * self.o_proj_bias + self.kv_lora_rank + (self.q_lora_rank or 0)
