"""Rotary fields of a Hugging Face config, old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

import math
from typing import Any

from workbench.errors import WorkbenchError
from workbench.model.config_fields import Fields
from workbench.model.spec import Rotary, RotaryScaling

KINDS = ("default", "linear", "llama3", "yarn")
BASE = 10_000.0


def rotary_from(config: Fields, base: float = BASE) -> Rotary:
    """Read the rotary part of `config`. As in transformers, a base inside the object goes before `rope_theta`; `base`
    is that of the family where the config has none."""
    _refuse_partial(config)
    old, new = config.inner("rope_scaling"), config.inner("rope_parameters")
    found = [_read(config, fields, base) for fields in (old, new) if fields is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise WorkbenchError(f"{config.where}: rope_scaling and rope_parameters disagree; keep the right one")
    return found[0] if found else Rotary(base=_base(config, None, base))


def rotary_of_layers(config: Fields, layers: str, old_base: str, base: float, old_scaling: bool) -> Rotary:
    """Read the rotary of the layers that `layer_types` calls `layers`, for families whose kinds of layers have
    rotaries of their own: in `rope_parameters` under that name; in old configs the base is in `old_base`, and
    `rope_scaling` is that of the layers with `old_scaling`."""
    new = config.inner("rope_parameters")
    mine = None if new is None else new.inner(layers)
    values = {"rope_theta": config.get(old_base)}
    if mine is not None:
        values["rope_parameters"] = mine.values
    elif old_scaling:
        values["rope_scaling"] = config.get("rope_scaling")
    places = {key: config.get(key) for key in ("max_position_embeddings", "partial_rotary_factor")}
    return rotary_from(Fields({**places, **values}, config.where if mine is None else mine.where), base)


def rotary_to(rotary: Rotary) -> dict[str, Any]:
    """Write the old fields, which old and new versions of transformers both read."""
    scaling, inner = rotary.scaling, None
    if scaling.kind == "linear":
        inner = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling.kind == "llama3":
        inner = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_factor,
            "high_freq_factor": scaling.high_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    elif scaling.kind == "yarn":
        inner = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.fast_turns,
            "beta_slow": scaling.slow_turns,
            "truncate": scaling.whole_pairs,
            "attention_factor": scaling.amplitude,
            "original_max_position_embeddings": scaling.original_context,
        }
    return {"rope_theta": rotary.base, "rope_scaling": inner}


def yarn_gain(factor: float, coefficient: float = 1.0) -> float:
    """Return the factor by which YaRN raises attention's temperature for a context `factor` times the trained one: 0.1
    c ln f + 1."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def yarn_gain_of_scores(config: Fields) -> float:
    """Return the factor by which DeepSeek multiplies the scores besides, from `mscale_all_dim`: the square of that
    gain."""
    fields = config.inner("rope_scaling") or config.inner("rope_parameters")
    coefficient = None if fields is None else fields.number("mscale_all_dim", default=None, zero=True)
    if fields is None or not coefficient or _kind(fields) == "default":
        return 1.0
    return yarn_gain(_factor(config, fields), coefficient) ** 2


def _read(config: Fields, fields: Fields, base: float) -> Rotary:
    _refuse_partial(fields)
    kind = _kind(fields)
    if kind not in KINDS:
        raise WorkbenchError(f"{fields.where}: rope type {kind!r} is not carried out; read: {', '.join(KINDS)}")
    base = _base(config, fields, base)
    if kind == "linear":
        return Rotary(base=base, scaling=RotaryScaling(kind="linear", factor=fields.number("factor")))
    if kind == "llama3":
        return Rotary(base=base, scaling=_llama3(fields))
    if kind == "yarn":
        if base <= 1:
            raise fields.wrong("rope_theta", base, "above 1 with yarn")
        return Rotary(base=base, scaling=_yarn(config, fields))
    return Rotary(base=base)


def _kind(fields: Fields) -> Any:
    return fields.get("rope_type") or fields.get("type") or "default"


def _llama3(fields: Fields) -> RotaryScaling:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.wrong("high_freq_factor", high, f"above low_freq_factor, which is {low}")
    return RotaryScaling(
        kind="llama3",
        factor=fields.number("factor"),
        low_factor=low,
        high_factor=high,
        original_context=fields.integer("original_max_position_embeddings"),
    )


def _yarn(config: Fields, fields: Fields) -> RotaryScaling:
    fast, slow = fields.number("beta_fast", default=32.0), fields.number("beta_slow", default=1.0)
    if fast <= slow:
        raise fields.wrong("beta_fast", fast, f"above beta_slow, which is {slow}")
    factor = _factor(config, fields)
    up, down = (fields.number(key, default=None, zero=True) for key in ("mscale", "mscale_all_dim"))
    gain = yarn_gain(factor, up) / yarn_gain(factor, down) if up and down else yarn_gain(factor)
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        fast_turns=fast,
        slow_turns=slow,
        whole_pairs=fields.boolean("truncate", default=True),
        amplitude=fields.number("attention_factor", default=gain),
        original_context=_original(config, fields),
    )


def _factor(config: Fields, fields: Fields) -> float:
    """Return the factor; where it is absent, the context over the one trained with (DeepSeek-V3)."""
    if fields.get("factor") is None:
        return config.integer("max_position_embeddings") / _original(config, fields)
    return fields.number("factor")


def _original(config: Fields, fields: Fields) -> int:
    known = fields.integer("original_max_position_embeddings", default=None)
    return known or config.integer("max_position_embeddings")


def _base(config: Fields, inner: Fields | None, base: float) -> float:
    outer = config.number("rope_theta", default=base)
    return inner.number("rope_theta", default=outer) if inner else outer


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        given = fields.get("partial_rotary_factor")
        raise fields.wrong("partial_rotary_factor", given, "1: partly rotated heads are not carried out")
