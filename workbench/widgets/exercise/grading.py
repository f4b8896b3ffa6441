"""Parse a typed answer, compare it with the computed one, and format both in their unit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError

NUMBER = re.compile(r"([-+−]?)(\d{1,3}(?:,\d{3})+|[\d_]*)(\.\d*)?(e[-+]?\d{1,3})?", re.I)
# Families of units that convert into one another, with their factors.
UNITS = (
    {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9, "min": 60.0},
    {"bytes": 1.0, "byte": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
     "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    {"": 1.0, "%": 0.01},
)  # fmt: skip


@dataclass(frozen=True)
class ComputedAnswer:
    """The computed answer: a number with its unit and tolerance, or one of several choices.

    `tolerance` is the largest relative error that counts as right; 0 requires the exact number.
    """

    value: Any
    choices: tuple[str, ...] = ()
    unit: str = ""
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if self.choices:
            if str(self.value) not in self.choices:
                raise WorkbenchError(f"the answer {self.value!r} is none of the choices {', '.join(self.choices)}")
        elif self.value is None or isinstance(self.value, str) or not math.isfinite(self.value):
            raise WorkbenchError(f"the answer {self.value!r} is no number; give `choices`, or compute a number")

    def accepts(self, given: str) -> bool:
        """Return whether a typed answer is right. Raises WorkbenchError if it is not a number in this unit."""
        if self.choices:
            return given == str(self.value)
        found, right = parse_number(given, self.unit), float(self.value)
        return math.isclose(found, right, rel_tol=max(self.tolerance, 1e-12), abs_tol=1e-12 * (right == 0))

    def __str__(self) -> str:
        """Return the answer with the digits that its tolerance requires, and its unit."""
        if self.choices:
            return str(self.value)
        digits = 17 if self.tolerance < 1e-12 else max(3, 1 + math.ceil(-math.log10(self.tolerance)))
        value = float(self.value)
        whole = value.is_integer() and abs(value) < 1e15
        text = f"{value:,.0f}" if whole else f"{value:,.{digits}g}"
        return f"{text} {self.unit}".strip()


def parse_number(text: str, unit: str = "") -> float:
    """Return a typed number converted to `unit`: `1,632`, `2.5e3`, `3 KiB` for bytes, `20 ms` for seconds.

    A number without a unit is taken to be in `unit`.

    Raises:
        WorkbenchError: the text is not a number, or its unit does not convert into `unit`.
    """
    match = NUMBER.match(text.strip())
    sign, whole, fraction, power = match.groups() if match else ("", "", None, None)
    digits = f"{whole.replace(',', '').replace('_', '')}{fraction or ''}{power or ''}"
    if match is None or not re.search(r"\d", f"{whole}{fraction or ''}"):
        raise WorkbenchError(f"Type a number{_in(unit)}, such as 1,632 or 2.5e3: {text.strip()!r} is none.")
    rest = text.strip()[match.end() :].strip()
    value = float(digits) * (-1 if sign in ("-", "−") else 1)
    return value * _factor(rest, unit, text)


def wanted(choices: Sequence[str], unit: str) -> str:
    """Return the message that is shown when an answer is empty: what to choose or type."""
    return "Choose one of the answers first." if choices else f"Type a number{_in(unit)} first."


def _factor(given: str, unit: str, text: str) -> float:
    if given == "" or _singular(given) == _singular(unit):
        return 1.0
    for family in UNITS:
        if given in family and unit in family:
            return family[given] / family[unit]
    raise WorkbenchError(f"Type a number{_in(unit)}: {given!r} in {text.strip()!r} is no unit that converts into it.")


def _singular(unit: str) -> str:
    return unit.lower().removesuffix("s") if len(unit) > 3 else unit


def _in(unit: str) -> str:
    return f" in {unit}" if unit else ""
