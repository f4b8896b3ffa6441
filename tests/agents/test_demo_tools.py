"""The tools of demo-chat: exact, bounded, and one sentence for what they cannot do."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.agents.demo_tools import (
    MAX_EXPONENT,
    MAX_EXPRESSION,
    UNITS,
    calculate,
    convert,
    documentation,
    lookup,
    number_text,
)

NUMBERS = st.integers(0, 10**9).map(str) | st.decimals(0, 10**6, places=3).map(lambda value: f"{value:f}")


@given(NUMBERS, NUMBERS, NUMBERS, st.sampled_from("+-*"), st.sampled_from("+-*"))
def test_an_expression_has_the_value_that_exact_fractions_give(a: str, b: str, c: str, one: str, two: str) -> None:
    exact = eval(f"Fraction('{a}') {one} (Fraction('{b}') {two} Fraction('{c}'))")
    assert calculate(f"{a} {one} ({b} {two} {c})") == number_text(exact)


@given(st.fractions(-(10**9), 10**9))
def test_a_number_is_written_to_six_decimals_without_zeros_at_the_end(value: Fraction) -> None:
    text = number_text(value)
    assert abs(Fraction(text) - value) <= Fraction(1, 2 * 10**6)
    assert "e" not in text and text not in ("-0", "") and not ("." in text and text.endswith(("0", ".")))


@given(st.text(max_size=60) | st.text("0123456789+-*/(). ", max_size=60))
def test_whatever_is_written_gives_a_number_or_a_sentence(text: str) -> None:
    try:
        assert calculate(text).strip("-").replace(".", "", 1).isdigit()
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    "expression, reason",
    [
        ("1 / 0", "division by zero"), ("0 ** -1", "division by zero"), ("9 ** 9 ** 9", "exponent"),
        ("(2 ** 64) ** 64", "too large"), ("1e5", "digits and a point"), ("1_000", "digits and a point"),
        ("abs(1)", "not an arithmetic"), ("True + 1", "not an arithmetic"), ("1 +", "not an arithmetic"),
        ("(" * 150, "not an arithmetic"), ("1 + " * 60 + "1", "longer than"),
    ],
)  # fmt: skip
def test_what_cannot_be_worked_out_says_why(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        calculate(expression)


@given(st.sampled_from(sorted(UNITS)), st.sampled_from(sorted(UNITS)), st.integers(1, 9999))
def test_a_conversion_goes_there_and_back_within_its_rounding(unit: str, to: str, value: int) -> None:
    """A result has an error of at most half of 10^-6 of its unit."""
    if UNITS[unit][0] != UNITS[to][0]:
        with pytest.raises(ValueError, match="do not measure the same quantity"):
            convert(value, unit, to)
        return
    there = Fraction(convert(value, unit, to))
    ratio = UNITS[to][2] / UNITS[unit][2]
    assert abs(Fraction(convert(float(there), to, unit)) - value) <= ratio / 10**6 + Fraction(1, 10**6)


def test_known_conversions() -> None:
    assert convert(100, "celsius", "fahrenheit") == "212" and convert(0, "kelvin", "celsius") == "-273.15"
    assert convert(3, "weeks", "seconds") == "1814400" and convert(26.2, "miles", "km") == "42.164813"
    with pytest.raises(ValueError, match="unknown unit parsecs"):
        convert(1, "parsecs", "km")


def test_documentation_is_that_of_listed_modules_alone() -> None:
    assert lookup("json.dumps").startswith("Serialize") and lookup("str.split").startswith("Return a list")
    for name in ("json", "json.nothing", "antigravity.fly", "os._exit", "str.__add__", "json.dumps ", "", ".", "no.pe"):
        assert documentation(name) is None
        with pytest.raises(ValueError, match="nothing named"):
            lookup(name)


def test_limits_are_the_last_that_is_worked_out() -> None:
    longest = "1" + "+1" * ((MAX_EXPRESSION - 1) // 2)
    longest += "." * (MAX_EXPRESSION - len(longest))
    assert len(longest) == MAX_EXPRESSION and calculate(longest) == str((MAX_EXPRESSION + 1) // 2)
    assert calculate(f"1 ** {MAX_EXPONENT}") == "1" == calculate(f"1 ** -{MAX_EXPONENT}")
    for expression, reason in ((longest + " ", "longer than"), (f"1 ** {MAX_EXPONENT + 1}", "exponent")):
        with pytest.raises(ValueError, match=reason):
            calculate(expression)
