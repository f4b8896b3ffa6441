"""Multi-head latent attention as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.model.rotary_spec import Rotary, Value
from workbench.request import UserPart


class LatentAttention(Value):
    """The sizes of multi-head latent attention (DeepSeek-V2, 2024). A token leaves `kv_lora_rank` numbers in the
    cache, from which every head's key and value are made, and one key of width `qk_rope_head_dim`, rotated by its
    position, that all heads share.

    A head's query and key have `qk_nope_head_dim` columns without rotary, then `qk_rope_head_dim` rotated ones;
    its value has `v_head_dim`. With `q_lora_rank` queries are made from that many numbers. `rope_interleave` pairs are
    the columns 2i and 2i + 1, others i and i + rope_dim / 2.
    """

    kind: Literal["latent"] = "latent"
    heads: Annotated[int, Field(ge=1)]
    latent: Annotated[int, Field(ge=1)]
    rope_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    plain_dim: Annotated[int, Field(ge=1)]
    value_dim: Annotated[int, Field(ge=1)]
    query_latent: Annotated[int, Field(ge=1)] | None = None
    window: Annotated[int, Field(ge=1)] | None = None
    sinks: Annotated[int, Field(ge=0)] = 0
    softcap: Annotated[float, Field(ge=0)] = 0.0
    scale: Annotated[float, Field(gt=0)] | None = None  # of the scores; None is (plain_dim + rope_dim) ** -0.5
    rotary: Rotary | None = None  # None is the model's
    interleaved: bool = True
    norm_eps: float = 1e-6  # of the norms of both latents
    mask: UserPart | None = None  # custom, as in AttentionSpec
    score: UserPart | None = None
    input_bias: bool = False  # on the projections to the latents
    output_bias: bool = False

    @model_validator(mode="after")
    def _possible(self) -> LatentAttention:
        if self.sinks and self.window is None:
            raise ValueError(f"sinks {self.sinks} without a window: the whole context is in sight already")
        if self.input_bias and self.query_latent is None:
            raise ValueError("input_bias without query_latent: queries that come from no latent have no bias")
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
    def groups(self) -> int:
        """Return 1: one cached head, which all query heads read."""
        return 1

    @property
    def dim(self) -> int:
        """Return the width of the cached head: the latent, whose columns are the values, and the rotated key."""
        return self.latent + self.rope_dim

    @property
    def share(self) -> int:
        return self.heads

    @property
    def cached(self) -> int:
        """Return the numbers that a token leaves in the cache: values are columns of the keys."""
        return self.dim

    @property
    def turned(self) -> int:
        return self.rope_dim

    @property
    def mixed(self) -> int:
        """Return the columns that the output projection reads."""
        return self.heads * self.value_dim

    @property
    def queries(self) -> int:
        """Return the columns of all heads' queries before they are absorbed."""
        return self.heads * (self.plain_dim + self.rope_dim)

    @property
    def down(self) -> int:
        """Return the columns of the fused projection from the model's width: queries or their latent, then the cached
        head."""
        return (self.query_latent or self.queries) + self.dim

    def matrices(self, width: int) -> int:
        """Return the number of parameters in its matrices, in a model of that width."""
        up = self.latent * self.heads * (self.plain_dim + self.value_dim) + (self.query_latent or 0) * self.queries
        return width * (self.down + self.mixed) + up

    def vectors(self, width: int) -> int:
        """Return the number of its other parameters: biases and norms."""
        return self.down * self.input_bias + width * self.output_bias + self.latent + (self.query_latent or 0)
