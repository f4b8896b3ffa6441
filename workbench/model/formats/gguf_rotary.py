"""The rotary part of a GGUF file's metadata, as config.json has it."""

from __future__ import annotations

import math
from typing import Any

from workbench.model.formats.gguf_values import GGUFValues

# Llama 3.1's passage, which llama.cpp's converter takes for all files; only the factor differs.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_rotary(values: GGUFValues, base: float) -> dict[str, Any]:
    """Return `rope_theta`, and `rope_scaling` where there is a scaling.

    Args:
        values: the metadata.
        base: the architecture's base where the metadata have none.

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
        raise values.invalid("rope.scaling.type", kind, "none, linear or yarn: others are not carried out")
    return found


def _llama3(values: GGUFValues, factors: list[float], base: float) -> dict[str, Any]:
    """Return the scaling that divides the frequencies by `factors`, one for each pair of a head's columns."""
    scaling = {"rope_type": "llama3", "factor": max(factors), **LLAMA3}
    columns = 2 * len(factors)
    for index, found in enumerate(factors):
        right = llama3_factor(base ** (-2 * index / columns), scaling)
        if not math.isclose(found, right, rel_tol=1e-4):
            raise values.invalid(
                "rope_freqs.weight", factors[:4], "the factors of Llama 3.1's scaling: others are not carried out"
            )
    return scaling


def llama3_factor(frequency: float, scaling: dict[str, Any]) -> float:
    """Return what Llama 3.1's scaling divides a frequency by."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the trained context
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
