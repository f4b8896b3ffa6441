"""Describe layers with a recurrent state, which take the place of attention: short convolutions, gated delta nets,
Mamba-2.

They take the place of attention.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from workbench.settings import Settings

STATE_ITEMSIZE = 4  # bytes of a number of a state, which is float32


class RecurrentSpec(Settings):
    """A layer with a state of fixed size per sequence, and without keys and values.

    It has no heads that attend, no window and no positions. `state_shapes` are the tensors of the state.
    """

    kind: str
    # Values of attention's attributes for a layer without attention: no heads, no cached values, no window, no scores.
    num_heads: ClassVar[int] = 0
    num_kv_heads: ClassVar[int] = 0
    head_dim: ClassVar[int] = 0
    queries_per_kv: ClassVar[int] = 0
    cache_values_per_token: ClassVar[int] = 0
    cache_values_read: ClassVar[int] = 0
    kv_shared_with: ClassVar[None] = None
    rotary_dim: ClassVar[int] = 0
    num_sink_tokens: ClassVar[int] = 0
    sliding_window: ClassVar[None] = None
    rotary: ClassVar[None] = None
    mask: ClassVar[None] = None
    score: ClassVar[None] = None
    module: ClassVar[None] = None
    position: ClassVar[Literal["recurrent"]] = "recurrent"
    sink_logits: ClassVar[Literal[False]] = False

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each tensor of one sequence's state."""
        raise NotImplementedError

    @property
    def state_flops(self) -> float:
        """Return the FLOPs per token to update and read the state."""
        raise NotImplementedError

    @property
    def o_proj_inputs(self) -> int:
        """Return the number of columns that the output projection reads."""
        raise NotImplementedError

    @property
    def num_columns(self) -> int:
        """Return the number of intermediate values that a token needs in the layer."""
        raise NotImplementedError

    def matrix_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters in the layer's matrices, in a model of width `hidden_size`."""
        raise NotImplementedError

    def vector_parameters(self, hidden_size: int) -> int:
        """Return the number of the layer's parameters outside of matrices."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one sequence's state."""
        return STATE_ITEMSIZE * sum(map(math.prod, self.state_shapes))


class ShortConvSpec(RecurrentSpec):
    """A gated convolution of each channel over its last `kernel` tokens (LFM2, Liquid AI, 2025).

    b, c, x = the input's projections; y = c * conv(b * x). Its state is the last kernel - 1 values of b * x.
    """

    kind: Literal["short_conv"] = "short_conv"
    channels: Annotated[int, Field(ge=1)]
    kernel: Annotated[int, Field(ge=2)] = 3
    bias: bool = False  # biases on the convolution and both projections

    @property
    def input_columns(self) -> int:
        """Return the number of columns of the input projection: b, c and x."""
        return 3 * self.channels

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.channels, self.kernel - 1),)

    @property
    def state_flops(self) -> float:
        return 2.0 * self.channels * self.kernel

    @property
    def o_proj_inputs(self) -> int:
        return self.channels

    @property
    def num_columns(self) -> int:
        return 5 * self.channels

    def matrix_parameters(self, hidden_size: int) -> int:
        return 4 * self.channels * hidden_size

    def vector_parameters(self, hidden_size: int) -> int:
        return self.channels * self.kernel + (4 * self.channels + hidden_size) * self.bias


class DeltaNetSpec(RecurrentSpec):
    """Linear attention by the gated delta rule (Yang et al., 2025), as in Qwen 3 Next.

    Each of `num_key_heads` queries and keys of width `key_dim` serves several of the `num_value_heads` values of width
    `value_dim`. All go through a convolution over `kernel` tokens first. Its state is the last inputs of the
    convolution, and a matrix [key_dim, value_dim] for each value head.
    """

    kind: Literal["delta_net"] = "delta_net"
    num_key_heads: Annotated[int, Field(ge=1)]
    num_value_heads: Annotated[int, Field(ge=1)]
    key_dim: Annotated[int, Field(ge=1)]
    value_dim: Annotated[int, Field(ge=1)]
    kernel: Annotated[int, Field(ge=2)] = 4
    eps: Annotated[float, Field(gt=0)] = 1e-6  # eps of the output norm, by head

    @model_validator(mode="after")
    def _shared(self) -> DeltaNetSpec:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"{self.num_value_heads} value heads cannot share {self.num_key_heads} keys evenly")
        return self

    @property
    def channels(self) -> int:
        """Return the number of columns that the convolution reads: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.o_proj_inputs

    @property
    def input_columns(self) -> int:
        """Return the number of columns of the input projection: those of the convolution, the output's gate, and two
        for each value head.
        """
        return self.channels + self.o_proj_inputs + 2 * self.num_value_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.channels, self.kernel - 1), (self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def state_flops(self) -> float:
        return 2.0 * self.channels * self.kernel + 7.0 * self.num_value_heads * self.key_dim * self.value_dim

    @property
    def o_proj_inputs(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_columns(self) -> int:
        return self.input_columns + self.channels + self.o_proj_inputs

    def matrix_parameters(self, hidden_size: int) -> int:
        return (self.input_columns + self.o_proj_inputs) * hidden_size

    def vector_parameters(self, hidden_size: int) -> int:
        return self.channels * self.kernel + 2 * self.num_value_heads + self.value_dim


class Mamba2Spec(RecurrentSpec):
    """A state-space layer (Mamba-2, Dao and Gu, 2024): `heads` heads of width `head_width`, each with a state of
    `state` columns.

    Heads of one of the `groups` share the directions in which inputs enter the state and are read from it. Inputs and
    directions go through a convolution over `kernel` tokens first. Its state is the last inputs of the convolution, and
    a matrix [head_width, state] for each head.
    """

    kind: Literal["mamba2"] = "mamba2"
    heads: Annotated[int, Field(ge=1)]
    head_width: Annotated[int, Field(ge=1)]
    state: Annotated[int, Field(ge=1)]
    groups: Annotated[int, Field(ge=1)] = 1
    kernel: Annotated[int, Field(ge=2)] = 4
    bias: bool = False  # biases on both projections
    o_proj_bias: bool | None = None  # bias of the output projection; None: as `bias`
    conv_bias: bool = True
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"  # norm of the output, by group
    eps: Annotated[float, Field(gt=0)] = 1e-5  # eps of the output norm
    # Factors of the projection's columns (Falcon-H1): gate, inputs, both directions (in, out), step sizes.
    column_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @model_validator(mode="after")
    def _grouped(self) -> Mamba2Spec:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads cannot share the directions of {self.groups} groups evenly")
        return self

    @property
    def channels(self) -> int:
        """Return the number of columns that the convolution reads: inputs, and the directions of each group."""
        return self.o_proj_inputs + 2 * self.groups * self.state

    @property
    def input_columns(self) -> int:
        """Return the number of columns of the input projection: the gate, those of the convolution, and a step size for
        each head.
        """
        return self.o_proj_inputs + self.channels + self.heads

    @property
    def column_counts(self) -> tuple[int, int, int, int, int]:
        """Return the numbers of columns of the gate, the inputs, the two directions, and the step sizes."""
        directions = self.groups * self.state
        return self.o_proj_inputs, self.o_proj_inputs, directions, directions, self.heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.channels, self.kernel - 1), (self.heads, self.head_width, self.state)

    @property
    def state_flops(self) -> float:
        return 2.0 * self.channels * self.kernel + 5.0 * self.heads * self.head_width * self.state

    @property
    def o_proj_inputs(self) -> int:
        return self.heads * self.head_width

    @property
    def num_columns(self) -> int:
        return self.input_columns + self.channels + self.o_proj_inputs

    def matrix_parameters(self, hidden_size: int) -> int:
        return (self.input_columns + self.o_proj_inputs) * hidden_size

    def vector_parameters(self, hidden_size: int) -> int:
        vectors = self.channels * (self.kernel + self.conv_bias) + 3 * self.heads
        vectors += self.o_proj_inputs * (self.norm != "none")
        return vectors + self.input_columns * self.bias + hidden_size * self.o_proj_has_bias

    @property
    def o_proj_has_bias(self) -> bool:
        return self.bias if self.o_proj_bias is None else self.o_proj_bias


AnyRecurrentSpec = Annotated[ShortConvSpec | DeltaNetSpec | Mamba2Spec, Field(discriminator="kind")]


class ParallelRecurrentSpec(Settings):
    """A recurrent layer parallel to attention (Falcon-H1, 2025): both read the layer's normalized input, each with its
    own factor; both results, each with its own factor, are added to the layer's input.
    """

    recurrent: AnyRecurrentSpec
    recurrent_input_scale: float = 1.0
    recurrent_output_scale: float = 1.0
    attention_input_scale: float = 1.0
    attention_output_scale: float = 1.0
