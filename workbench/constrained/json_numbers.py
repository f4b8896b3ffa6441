"""Restrict the numbers of a JSON Schema to those that the compiler represents exactly.

llguidance reads every number as a float64, writes it with its shortest decimal digits, and computes the range of an
integer in int64. An integer that becomes -2^63 there crashes the process.

  bound of an integer:   clamped | exact or refused | exact | exact or refused | clamped
                               -2^63              -2^53    2^53              2^63
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
BOUNDS = (*LOWER_BOUNDS, *UPPER_BOUNDS)
COUNTS = ("maxLength", "maxItems", "maxProperties")
ALL_EXACT = 1 << 53  # integers below are exact in float64, as are their neighbours
INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
CLAMP = (1 << 63) - 1024  # the largest float64 in int64


def number_faults(schema: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yield (keyword, message) for each value or bound in one subschema, without nested subschemas, that the compiler
    would round.
    """
    for path, number in _values(schema):
        if abs(number) > INT64_MAX or not _is_exact(number, is_integer=True):
            yield re.split(r"[.\[]", path, maxsplit=1)[0], f"{where}.{path}: {_rounded(number)}"
    for key, bound in _bounds(schema):
        if _carried_out(key, bound, schema) is None:
            yield key, f"{where}.{key}: {_rounded(bound)}"


def with_integers(value: Any) -> Any:
    """Return a copy of a schema in which a float with an integer value becomes an int (3.0 becomes 3), since the
    compiler parses integers without loss.
    """
    if isinstance(value, dict):
        return {key: with_integers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= INT64_MAX else value


def carry_out_bounds(schema: dict[str, Any]) -> None:
    """Tighten the bounds of one subschema that the compiler does not support to the nearest supported number: bounds of
    numbers at or beyond int64's range or with too many digits, and bounds of lengths and counts beyond int32's range.

    Tool schemas generated from Go, Rust, protobuf or MCP declare the bounds of their integer types."""
    for key, bound in _bounds(schema):
        nearest = _carried_out(key, bound, schema)
        if nearest is None or nearest == bound:
            continue
        del schema[key]
        name, tighter = ("minimum", max) if key in LOWER_BOUNDS else ("maximum", min)  # not exclusive any more
        schema[name] = tighter(nearest, schema[name]) if is_number(schema.get(name)) else nearest
    for key in COUNTS:
        if is_number(schema.get(key)):
            schema[key] = min(schema[key], INT32_MAX)


def _carried_out(key: str, bound: float, schema: dict[str, Any]) -> float | None:
    """Return the bound for the compiler: the bound itself or one just within it; None if the compiler would change it.
    """
    if key in LOWER_BOUNDS and bound <= -INT64_MAX:
        return -CLAMP
    if key in UPPER_BOUNDS and bound >= INT64_MAX:
        return INT64_MAX if key == "maximum" and _is_integer(schema) else CLAMP
    if abs(bound) < ALL_EXACT and not float(bound).is_integer():
        return bound if _is_exact(bound, False) else _rounded_inward(key, bound)
    if key.startswith("exclusive"):  # for an integer the compiler computes the neighbour in float64
        return bound if abs(bound) < ALL_EXACT else None
    return bound if abs(bound) <= INT64_MAX and _is_exact(bound, _is_integer(schema)) else None


def _is_exact(number: float, is_integer: bool) -> bool:
    """Return whether the compiler represents this number exactly: an integer with all digits of its float64, other
    numbers with the shortest digits.
    """
    if not float(number).is_integer():
        return _read_by_compiler(number) == number
    return abs(number) < ALL_EXACT or (float(number) if is_integer else Decimal(repr(float(number)))) == number


def _read_by_compiler(fraction: float) -> float:
    """Return a fraction as serde_json parses it: rounded twice, so the last digit of a long fraction may differ."""
    digits = Decimal(repr(fraction))
    places = -int(digits.as_tuple().exponent)
    return float(int(digits.scaleb(places))) / float(f"1e{places}")


def _rounded_inward(key: str, fraction: float) -> float:
    """Return the nearest number within a bound, with at most 15 digits and 22 decimal places, which every parser reads
    exactly.
    """
    digits = Decimal(repr(fraction))
    places = min(max(14 - digits.adjusted(), 0), 22)
    rounding = ROUND_CEILING if key in LOWER_BOUNDS else ROUND_FLOOR
    return float(digits.quantize(Decimal(1).scaleb(-places), rounding))


def _is_integer(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bounds(schema: dict[str, Any]) -> list[tuple[str, float]]:
    return [(key, schema[key]) for key in BOUNDS if is_number(schema.get(key))]


def _values(schema: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (path, number) for the numbers of `const` and `enum`, at any depth."""
    waiting = [(key, schema[key]) for key in ("const", "enum") if key in schema]
    while waiting:
        path, value = waiting.pop()
        if is_number(value):
            yield path, value
        elif isinstance(value, dict):
            waiting += ((f"{path}.{name}", each) for name, each in value.items())
        elif isinstance(value, list | tuple):
            waiting += ((f"{path}[{index}]", each) for index, each in enumerate(value))


def _rounded(number: float) -> str:
    return f"{number} is not supported: the compiler would round it; declare a string with a pattern"
