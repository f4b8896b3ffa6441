"""Rotary fields of a Hugging Face config, old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

from typing import Any

from workbench.errors import WorkbenchError
from workbench.model.config_fields import Fields
from workbench.model.spec import Rotary, RotaryScaling

KINDS = ("default", "linear", "llama3")


def rotary_from(config: Fields) -> Rotary:
    """The rotary part of `config`. As in transformers, a base inside the object goes before `rope_theta`."""
    _refuse_partial(config)
    old, new = config.inner("rope_scaling"), config.inner("rope_parameters")
    found = [_read(config, fields) for fields in (old, new) if fields is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise WorkbenchError(f"{config.where}: rope_scaling and rope_parameters disagree; keep the right one")
    return found[0] if found else Rotary(base=_base(config, None))


def rotary_to(rotary: Rotary) -> dict[str, Any]:
    """The old fields, which old and new versions of transformers both read."""
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
    return {"rope_theta": rotary.base, "rope_scaling": inner}


def _read(config: Fields, fields: Fields) -> Rotary:
    _refuse_partial(fields)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in KINDS:
        raise WorkbenchError(f"{fields.where}: rope type {kind!r} is not carried out; read: {', '.join(KINDS)}")
    base = _base(config, fields)
    if kind == "linear":
        return Rotary(base=base, scaling=RotaryScaling(kind="linear", factor=fields.number("factor")))
    if kind == "llama3":
        return Rotary(base=base, scaling=_llama3(fields))
    return Rotary(base=base)


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


def _base(config: Fields, inner: Fields | None) -> float:
    outer = config.number("rope_theta", default=10_000.0)
    return inner.number("rope_theta", default=outer) if inner else outer


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        given = fields.get("partial_rotary_factor")
        raise fields.wrong("partial_rotary_factor", given, "1: partly rotated heads are not carried out")
