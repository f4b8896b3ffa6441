"""Rotary embedding as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.shown import Brief


class Value(Brief, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RotaryScaling(Value):
    """How rotary frequencies are changed for contexts longer than the trained one.

    `linear` divides all of them by `factor`; `llama3` (Llama 3.1) divides only the slow ones, with a smooth
    passage between the wavelengths `original_context / high_factor` and `original_context / low_factor`; `yarn`
    (Peng et al., 2023) divides those with fewer than `slow_turns` turns in the original context, keeps those with more
    than `fast_turns`, and multiplies cosines and sines by `amplitude`.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: Annotated[float, Field(gt=0)] = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    fast_turns: Annotated[float, Field(gt=0)] = 32.0
    slow_turns: Annotated[float, Field(gt=0)] = 1.0
    whole_pairs: bool = True  # yarn's passage begins and ends at whole pairs
    amplitude: Annotated[float, Field(gt=0)] = 1.0
    original_context: int = 8192


class Rotary(Value):
    base: Annotated[float, Field(gt=0)] = 10_000.0
    scaling: RotaryScaling = RotaryScaling()
