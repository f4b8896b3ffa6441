"""Declare measures with their units; format bytes, durations, percents and rates, and parse sizes.

Bytes have binary units (1 GiB = 2**30 bytes). A number is rounded to three significant digits, or to four if its unit
has no prefix; digits before the point are never dropped. An unknown value is `–`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.errors import WorkbenchError

Direction = Literal["min", "max"]
Units = Sequence[tuple[str, float]]  # the largest first
UNKNOWN = "–"
BYTES: Units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
SECONDS: Units = (("s", 1), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
DECIMAL: Units = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1))
SIZES = {unit.upper(): size for unit, size in (*BYTES, *((f"{prefix}B", size) for prefix, size in DECIMAL), ("", 1))}
MAX_BYTES = 2**60


@dataclass(frozen=True)
class Measure:
    """A quantity that a workload measures: its name, label, unit and better direction.

    Args:
        name: its key in rows and summaries, groups joined by `_`. A `*` stands for what differs: a percentile.
        label: heading of its column, by default the name in words; `{}` is what the `*` stands for.
        unit: as `format_quantity` takes it; empty for a pure number.
        better: whether less or more of it is better; None where neither is.
        timed: whether other processes on the machine may change it.
    """

    name: str
    label: str = ""
    unit: str = ""
    better: Direction | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        if self.better not in ("min", "max", None):
            raise ValueError(f"measure {self.name!r}: better must be 'min', 'max' or None, not {self.better!r}")

    @property
    def heading(self) -> str:
        return self.label or self.name.replace("_", " ")


def duration(name: str, label: str, unit: str = "s") -> Measure:
    """Return a measure that is a measured time; shorter is better."""
    return Measure(name, label, unit, "min", timed=True)


def ratio(name: str, label: str, better: Direction = "min") -> Measure:
    """Return a measure that is a ratio of two measured times; by default less is better."""
    return Measure(name, label, "", better, timed=True)


def share(name: str, label: str = "", better: Direction | None = "max", timed: bool = False) -> Measure:
    """Return a measure that is a fraction from 0 to 1, shown as a percentage; by default more is better."""
    return Measure(name, label, "of 1", better, timed)


def rate(name: str, label: str, unit: str) -> Measure:
    """Return a measure that is an amount per second, in `unit` per second; more is better."""
    return Measure(name, label, f"{unit}/s", "max", timed=True)


def format_number(value: float | None) -> str:
    """Format a number with four digits: `0.0123`, `12.5`, `1,234`; None and NaN are unknown."""
    return UNKNOWN if value is None or value != value else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def format_bytes(size: float | None) -> str:
    """Format a size in bytes: `39.1 GiB`."""
    return _in_largest_unit(size, BYTES)


def format_seconds(value: float | None) -> str:
    """Format a measured time: `1.5 s`, `20 ms`, `3.14 µs`."""
    return _in_largest_unit(value, SECONDS)


def format_duration(seconds: float | None) -> str:
    """Format a duration: below a minute as `format_seconds` does, from a minute on as `2:05 min`, from an hour on as
    `1:02 h`.
    """
    if seconds is None or (whole := round(seconds)) < 60:
        return format_seconds(seconds)
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


def format_percent(fraction: float | None) -> str:
    """Format a fraction from 0 to 1 as a percentage: `12.5%`; fractions between 0 and 0.0001 are `<0.01%`."""
    if fraction is None or fraction != fraction:
        return UNKNOWN
    return "<0.01%" if 0 < fraction < 1e-4 else f"{_three_digits(100 * fraction)}%"


def format_quantity(value: float | None, unit: str) -> str:
    """Format a value in a unit or as a rate: `2 KiB/token`, `24.8 tokens/s`, `433 GFLOP/s`; a fraction has the unit `of
    1`.
    """
    kind, slash, per = unit.partition("/")
    if value is None or unit == "of 1":
        return format_percent(value)
    if kind == "ms":
        kind, value = "s", value / 1e3
    if units := {"bytes": BYTES, "s": SECONDS}.get(kind):
        return _in_largest_unit(value, units) + slash + per
    if kind.startswith("FLOP"):
        return _in_largest_unit(value, DECIMAL) + unit
    return f"{format_number(value)} {unit}".strip()


def parse_bytes(text: str) -> int:
    """Parse `80GB`, `64MiB` or `1000000` into bytes. Raises WorkbenchError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text.replace(",", ""))
    size = float(match[1]) * SIZES.get(match[2].upper(), 0) if match else 0
    if not 0 < size < MAX_BYTES:
        raise WorkbenchError(f"memory {text!r}: write a number and a unit, such as 80GB or 64GiB")
    return int(size)


def largest_unit(value: float, units: Units) -> tuple[str, float]:
    """Return (unit, size) of the largest unit in which a value, rounded to three digits, is at least 1; for zero, the
    unit without a prefix.
    """
    if not value:
        return next(each for each in units if each[1] == 1)
    return next((each for each in units if float(f"{abs(value) / each[1]:.3g}") >= 1), units[-1])


def _in_largest_unit(value: float | None, units: Units) -> str:
    if value is None or value != value:
        return UNKNOWN
    unit, size = largest_unit(value, units)
    return f"{_three_digits(value / size)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
