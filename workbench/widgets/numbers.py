"""Format numbers of pictures with three digits in the unit in which they are read."""

from __future__ import annotations


def format_seconds(value: float | None) -> str:
    """`1.5 s`, `20 ms`, `3.14 µs`; – for what is not known."""
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def format_percent(fraction: float) -> str:
    """`12.5 %`; what is less than a hundredth of one is not counted out."""
    return f"{100 * fraction:.3g} %" if fraction >= 0.0001 else "< 0.01 %"
