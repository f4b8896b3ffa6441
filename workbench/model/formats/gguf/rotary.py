"""Convert the rotary metadata of a GGUF file to the form of config.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.model.attention_spec import RotaryConfig, RotaryScaling
from workbench.model.formats.gguf.values import GGUFValues
from workbench.model.rotary import rotary_frequencies

# Llama 3.1's transition, which llama.cpp's converter uses for all files; only the factor differs.
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_rotary(values: GGUFValues, base: float) -> dict[str, Any]:
    """Return `rope_theta`, and `rope_scaling` if the metadata have a scaling, as config.json has them.

    Args:
        values: the metadata.
        base: the architecture's base, if the metadata have none.

    Raises:
        WorkbenchError: for scalings that config.json cannot express.
    """
    found: dict[str, Any] = {"rope_theta": values.number("rope.freq_base", default=base)}
    kind = values.text("rope.scaling.type") or "none"
    factor = values.number("rope.scaling.factor", default=None)
    factor = factor or values.number("rope.scale_linear", default=None)
    original = values.integer("rope.scaling.original_context_length", default=None)
    factors, short, long = (
        values.numbers(f"{name}.weight") for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")
    )
    if short or long:
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": values.number("rope.scaling.attn_factor", default=None),
        }
    elif factors:
        found["rope_scaling"] = _llama3(values, factors, found["rope_theta"])
    elif kind == "yarn":
        found["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": values.number("rope.scaling.yarn_beta_fast", default=32.0),
            "beta_slow": values.number("rope.scaling.yarn_beta_slow", default=1.0),
        }
    elif kind == "linear" or (kind == "none" and factor not in (None, 1.0)):
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise values.invalid("rope.scaling.type", kind, "none, linear or yarn: other scalings are not supported")
    return found


def _llama3(values: GGUFValues, factors: list[float], base: float) -> dict[str, Any]:
    """Return the scaling that divides the frequencies by `factors`, one for each pair of a head's columns."""
    right = llama3_factors(base, max(factors), 2 * len(factors))
    if not torch.allclose(torch.tensor(factors, dtype=torch.float64), right, rtol=1e-4, atol=0):
        raise values.invalid(
            "rope_freqs.weight", factors[:4], "the factors of Llama 3.1's scaling: other factors are not supported"
        )
    return {"rope_type": "llama3", "factor": max(factors), **LLAMA3}


def llama3_factors(base: float, factor: float, columns: int) -> Tensor:
    """Return the numbers by which Llama 3.1 divides the frequencies, one for each pair of a head's columns, in
    float64.
    """
    plain = RotaryConfig(rope_theta=base)
    scaled = RotaryConfig(rope_theta=base, scaling=RotaryScaling(kind="llama3", factor=factor, **LLAMA3))
    return rotary_frequencies(plain, columns) / rotary_frequencies(scaled, columns)
