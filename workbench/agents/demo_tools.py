"""The three tools that demo-chat was trained with: a calculator, units, and the standard library's documentation.

The tools are plain functions with type hints and docstrings. Every call is fast: exact numbers of a bounded size, a
table of units, names of listed modules. An impossible input raises ValueError; the model reads its text as the result.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

MAX_EXPRESSION = 200  # characters
MAX_EXPONENT = 64
MAX_BITS = 400  # bits of a numerator or denominator
PLACES = 6  # decimals of a fractional result
MAX_DOCUMENTATION = 120  # characters

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}  # fmt: skip

# Units by quantity, as factors of the first unit of each line, with all names of each unit.
_MEASURES: dict[str, dict[str, tuple[str, str]]] = {
    "length": {
        "m": ("1", "metre metres meter meters"), "mm": ("0.001", "millimetre millimetres millimeter millimeters"),
        "cm": ("0.01", "centimetre centimetres centimeter centimeters"),
        "km": ("1000", "kilometre kilometres kilometer kilometers"), "inch": ("0.0254", "inches"),
        "foot": ("0.3048", "feet ft"), "yard": ("0.9144", "yards yd"), "mile": ("1609.344", "miles mi"),
    },
    "mass": {
        "g": ("1", "gram grams"), "mg": ("0.001", "milligram milligrams"), "kg": ("1000", "kilogram kilograms"),
        "tonne": ("1000000", "tonnes"), "ounce": ("28.349523125", "ounces oz"), "pound": ("453.59237", "pounds lb"),
    },
    "time": {
        "second": ("1", "seconds s"), "millisecond": ("0.001", "milliseconds ms"), "minute": ("60", "minutes min"),
        "hour": ("3600", "hours h"), "day": ("86400", "days"), "week": ("604800", "weeks"),
    },
    "volume": {
        "litre": ("1", "litres liter liters l"), "ml": ("0.001", "millilitre millilitres milliliter milliliters"),
        "pint": ("0.473176473", "pints"), "gallon": ("3.785411784", "gallons"), "cup": ("0.2365882365", "cups"),
    },
    "data": {
        "byte": ("1", "bytes"), "bit": ("0.125", "bits"), "kilobyte": ("1000", "kilobytes kB"),
        "megabyte": ("1000000", "megabytes MB"), "gigabyte": ("1000000000", "gigabytes GB"),
    },
    "temperature": {"celsius": ("1", ""), "kelvin": ("1", ""), "fahrenheit": ("5/9", "")},
}  # fmt: skip
_ZEROS = {"celsius": Fraction("273.15"), "fahrenheit": Fraction(45967, 180)}  # 0 degrees, in kelvin
UNITS = {
    name: (measure, unit, Fraction(factor))
    for measure, units in _MEASURES.items()
    for unit, (factor, others) in units.items()
    for name in (unit, *others.split())
}

MODULES = (
    "abc", "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "codecs", "collections", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "enum", "fnmatch",
    "fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html", "inspect", "io", "ipaddress", "itertools",
    "json", "linecache", "locale", "logging", "math", "mimetypes", "operator", "os", "pathlib", "pickle", "platform",
    "pprint", "queue", "random", "re", "secrets", "shlex", "shutil", "socket", "sqlite3", "statistics", "string",
    "struct", "subprocess", "sys", "tarfile", "tempfile", "textwrap", "threading", "time", "tokenize", "traceback",
    "types", "unittest", "urllib", "uuid", "warnings", "weakref", "zipfile", "zlib",
)  # fmt: skip
TYPES = {kind.__name__: kind for kind in (str, list, dict, set, bytes, int, float, tuple)}


# A tool's docstring is what the model reads of it: one line. Expressions are of numbers, + - * / ** and parentheses,
# exact within; a result has at most six decimals.
def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    try:
        return number_text(_value(tree.body, expression.strip()))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def convert(value: float, unit: str, to: str) -> str:
    """Convert a value from one unit to another."""
    for name in (unit, to):
        if name not in UNITS:
            raise ValueError(f"unknown unit {name[:40]}")
    (measure, source, factor), (other, target, divisor) = UNITS[unit], UNITS[to]
    if measure != other:
        raise ValueError(f"{unit} and {to} do not measure the same quantity")
    exact = Fraction(str(value))
    if measure == "temperature":
        kelvin = exact * factor + _ZEROS.get(source, Fraction(0))
        return number_text((kelvin - _ZEROS.get(target, Fraction(0))) / divisor)
    return number_text(exact * factor / divisor)


def lookup(name: str) -> str:
    """Look up the documentation of a Python name."""
    text = documentation(name)
    if text is None:
        raise ValueError(f"nothing named {name[:60]}")
    return text


def documentation(name: str) -> str | None:
    """Return the first line of the docstring of the Python object `name` (`json.dumps`, `str.split`); None if there is
    none.
    """
    first, *rest = name.split(".")
    if not rest or not all(part.isidentifier() and not part.startswith("_") for part in rest):
        return None
    if first not in MODULES and first not in TYPES:
        return None
    found = TYPES.get(first) or importlib.import_module(first)
    for part in rest:
        found = getattr(found, part, None)
    text = inspect.getdoc(found) if callable(found) else None
    line = (text or "").strip().split("\n", 1)[0].strip()
    return line[:MAX_DOCUMENTATION] or None


def number_text(value: Fraction) -> str:
    """Return `value` as a whole number, or rounded to six decimals without zeros at the end."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = MAX_BITS
        text = f"{Decimal(round(value * 10**PLACES)).scaleb(-PLACES):f}"
    return text.rstrip("0").rstrip(".")


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            written = ast.get_source_segment(text, node) or ""
            if not written.replace(".", "", 1).isdigit():
                raise ValueError("numbers are written with digits and a point")
            return _bounded(Fraction(written.removesuffix(".") if written.endswith(".") else written))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, text)
        case ast.BinOp(left=left, op=how, right=right) if type(how) in _OPERATORS:
            return _bounded(_OPERATORS[type(how)](_value(left, text), _value(right, text)))
    raise ValueError("not an arithmetic expression")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"an exponent must be a whole number up to {MAX_EXPONENT}")
    _bounded(base)
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the numbers are too large")
    return value
