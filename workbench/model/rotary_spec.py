"""Rotary embedding as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.shown import ConciseRepr


class FrozenModel(ConciseRepr, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RotaryScaling(FrozenModel):
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


class RotaryConfig(FrozenModel):
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    scaling: RotaryScaling = RotaryScaling()
