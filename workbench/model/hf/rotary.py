"""Read the rotary fields of a Hugging Face config, old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

import math
from typing import Any

from workbench.errors import WorkbenchError
from workbench.model.attention_spec import RotaryConfig, RotaryScaling
from workbench.model.hf.fields import ConfigFields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_ROPE_THETA = 10_000.0
UNREAD_KEYS = ("llama_4_scaling_beta", "mrope_section", "alpha")
LONGROPE_KEYS = ("short_factor", "long_factor", "short_mscale", "long_mscale")


def read_rotary(config: ConfigFields, base: float = DEFAULT_ROPE_THETA, reads_partial: bool = False) -> RotaryConfig:
    """Read the rotary embedding of a config.

    As in transformers, a base inside the object takes precedence over `rope_theta`.

    Args:
        config: the config.
        base: the family's default base.
        reads_partial: whether the family reads `partial_rotary_factor` itself (`read_rotated_columns`).
    """
    if not reads_partial:
        for place in (config, config.nested("rope_scaling"), config.nested("rope_parameters")):
            if place is not None:
                _refuse_partial(place)
    old, new = config.nested("rope_scaling"), config.nested("rope_parameters")
    found = [_read(config, fields, base) for fields in (old, new) if fields is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise WorkbenchError(f"{config.source}: rope_scaling and rope_parameters disagree; keep the right one")
    return found[0] if found else RotaryConfig(rope_theta=_base(config, None, base))


def read_layer_rotary(config: ConfigFields, layers: str, old_base: str, base: float, old_scaling: bool) -> RotaryConfig:
    """Read the rotary embedding of the layers of type `layers` in `layer_types`, for families with a rotary for each
    type. New configs have it in `rope_parameters` under the type's name; old configs have the base in `old_base`, and
    `rope_scaling` applies only to layers with `old_scaling`.
    """
    new = config.nested("rope_parameters")
    mine = None if new is None else new.nested(layers)
    values = {"rope_theta": config.get(old_base)}
    if mine is not None:
        values["rope_parameters"] = mine.values
    elif old_scaling:
        values["rope_scaling"] = config.get("rope_scaling")
    if new is not None and not {"full_attention", "sliding_attention"} & set(new.values):
        raise config.invalid("rope_parameters", new.values, "an object of full_attention and of sliding_attention")
    if new is not None and mine is not None and old_scaling and config.nested("rope_scaling") is not None:
        raise config.invalid("rope_scaling", config.get("rope_scaling"), "absent where there are rope_parameters")
    keys = ("max_position_embeddings", "partial_rotary_factor", "original_max_position_embeddings")
    places = {key: config.get(key) for key in keys}
    return read_rotary(ConfigFields({**places, **values}, config.source if mine is None else mine.source), base)


def write_rotary(rotary: RotaryConfig) -> dict[str, Any]:
    """Return a rotary embedding as the old fields, which old and new versions of transformers both read."""
    scaling, inner = rotary.scaling, None
    if scaling.kind == "linear":
        inner = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling.kind == "llama3":
        inner = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    elif scaling.kind == "yarn":
        inner = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.attention_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return {"rope_theta": rotary.rope_theta, "rope_scaling": inner}


def yarn_attention_factor(factor: float, coefficient: float = 1.0) -> float:
    """Return the factor by which YaRN multiplies cosines and sines for a context `factor` times the trained one: 0.1 c
    ln(factor) + 1, where c is `coefficient`."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def yarn_score_factor(config: ConfigFields) -> float:
    """Return DeepSeek's additional factor of the scores: the square of `yarn_attention_factor` with the coefficient
    `mscale_all_dim`.
    """
    fields = config.nested("rope_scaling") or config.nested("rope_parameters")
    coefficient = None if fields is None else fields.number("mscale_all_dim", default=None, zero=True)
    if fields is None or not coefficient or _kind(fields) == "default":
        return 1.0
    return yarn_attention_factor(_factor(config, fields), coefficient) ** 2


def read_rotated_columns(config: ConfigFields, head_dim: int, default: float, keys: tuple[str, ...] = ()) -> int | None:
    """Read how many columns of a head are rotated, given as a fraction in the config; None for all.

    Args:
        config: the config.
        head_dim: columns of a head.
        default: the family's default fraction.
        keys: the family's own names of the fraction, besides `partial_rotary_factor`.
    """
    shares = [config.number(key, default=None) for key in (*keys, "partial_rotary_factor")]
    for inner in (config.nested("rope_parameters"), config.nested("rope_scaling")):
        shares += [None if inner is None else inner.number("partial_rotary_factor", default=None)]
    share = next((each for each in reversed(shares) if each is not None), default)
    columns = int(head_dim * share)
    if columns % 2 or not 0 < columns <= head_dim:
        raise config.invalid("partial_rotary_factor", share, f"a share of {head_dim} columns that is an even number")
    return None if columns == head_dim else columns


def _read(config: ConfigFields, fields: ConfigFields, base: float) -> RotaryConfig:
    kind = _kind(fields)
    if kind not in ROPE_TYPES:
        raise WorkbenchError(f"{fields.source}: rope type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    for key, value in fields.values.items():
        unread = key in UNREAD_KEYS or (key in LONGROPE_KEYS and kind != "longrope")
        if isinstance(value, dict) or (unread and value is not None):
            raise fields.invalid(key, value, "absent: its effect is not supported")
    base = _base(config, fields, base)
    if kind == "linear":
        return RotaryConfig(rope_theta=base, scaling=RotaryScaling(kind="linear", factor=fields.number("factor")))
    if kind == "dynamic":
        trained = config.integer("max_position_embeddings")
        scaling = RotaryScaling(kind=kind, factor=fields.number("factor"), original_max_position_embeddings=trained)
        return RotaryConfig(rope_theta=base, scaling=scaling)
    if kind == "longrope":
        return RotaryConfig(rope_theta=base, scaling=_longrope(config, fields))
    if kind == "llama3":
        return RotaryConfig(rope_theta=base, scaling=_llama3(config, fields))
    if kind == "yarn":
        if base <= 1:
            raise fields.invalid("rope_theta", base, "above 1 with yarn")
        return RotaryConfig(rope_theta=base, scaling=_yarn(config, fields))
    return RotaryConfig(rope_theta=base)


def _kind(fields: ConfigFields) -> Any:
    return fields.get("rope_type") or fields.get("type") or "default"


def _longrope(config: ConfigFields, fields: ConfigFields) -> RotaryScaling:
    outer = config.integer("original_max_position_embeddings", default=None)  # the field's place in early files
    original = _original(config, fields) if outer is None or fields.get("original_max_position_embeddings") else outer
    if original < 2:
        raise fields.invalid("original_max_position_embeddings", original, "at least 2")
    factor = fields.number("factor", default=config.integer("max_position_embeddings") / original)
    gain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    gain = fields.number("attention_factor", default=gain)
    return RotaryScaling(
        kind="longrope",
        short_factors=_factors(fields, "short_factor"),
        long_factors=_factors(fields, "long_factor"),
        attention_factor=fields.number("short_mscale", default=gain),
        long_attention_factor=fields.number("long_mscale", default=None),
        original_max_position_embeddings=original,
    )


def _factors(fields: ConfigFields, key: str) -> tuple[float, ...]:
    values = fields.get(key)
    numbers = isinstance(values, list) and all(isinstance(each, int | float) and each > 0 for each in values)
    if not numbers or any(isinstance(each, bool) for each in values):
        raise fields.invalid(key, values, "a list of numbers above 0, one for each pair of rotated columns")
    return tuple(map(float, values))


def _llama3(config: ConfigFields, fields: ConfigFields) -> RotaryScaling:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.invalid("high_freq_factor", high, f"above low_freq_factor, which is {low}")
    original = fields.integer("original_max_position_embeddings")
    _refuse_other_original(config, original)
    return RotaryScaling(
        kind="llama3",
        factor=fields.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _yarn(config: ConfigFields, fields: ConfigFields) -> RotaryScaling:
    fast, slow = fields.number("beta_fast", default=32.0), fields.number("beta_slow", default=1.0)
    if fast <= slow:
        raise fields.invalid("beta_fast", fast, f"above beta_slow, which is {slow}")
    factor = _factor(config, fields)
    up, down = (fields.number(key, default=None, zero=True) for key in ("mscale", "mscale_all_dim"))
    gain = (
        yarn_attention_factor(factor, up) / yarn_attention_factor(factor, down)
        if up and down
        else yarn_attention_factor(factor)
    )
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=fields.boolean("truncate", default=True),
        attention_factor=fields.number("attention_factor", default=gain),
        original_max_position_embeddings=_original(config, fields),
    )


def _factor(config: ConfigFields, fields: ConfigFields) -> float:
    """Return the factor; default: the context divided by the trained context (DeepSeek-V3)."""
    if fields.get("factor") is None:
        return config.integer("max_position_embeddings") / _original(config, fields)
    return fields.number("factor")


def _original(config: ConfigFields, fields: ConfigFields) -> int:
    known = fields.integer("original_max_position_embeddings", default=None)
    original: int = known or config.integer("max_position_embeddings")
    _refuse_other_original(config, original)
    return original


def _refuse_other_original(config: ConfigFields, original: int) -> None:
    """Raise WorkbenchError if a length outside of the rotary's object differs from the one inside: versions of
    transformers use either.
    """
    outer = config.integer("original_max_position_embeddings", default=None)
    if outer not in (None, original):
        raise config.invalid("original_max_position_embeddings", outer, f"{original}, as in the rotary's object")


def _base(config: ConfigFields, inner: ConfigFields | None, base: float) -> float:
    outer = config.number("rope_theta", default=base)
    return inner.number("rope_theta", default=outer) if inner else outer


def _refuse_partial(fields: ConfigFields) -> None:
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        given = fields.get("partial_rotary_factor")
        raise fields.invalid("partial_rotary_factor", given, "1: partly rotated heads are not supported")
