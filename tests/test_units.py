"""Laws of formatted numbers: each reads back within the digits it shows, and a larger value never reads as less."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.units import (
    BYTES,
    SECONDS,
    format_bytes,
    format_number,
    format_percent,
    format_quantity,
    format_seconds,
    parse_bytes,
)  # fmt: skip

SIZES = {"": 1, "%": 0.01, **dict(BYTES), **dict(SECONDS)}
FORMATS = (format_number, format_bytes, format_seconds, format_percent)
POSITIVE = st.floats(1e-4, 2**50)


def read(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.,e+-]+) ?([^\d]*)", text).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * SIZES[unit]


@pytest.mark.parametrize("form", FORMATS)
@given(POSITIVE, POSITIVE)
def test_numbers_read_back_within_three_digits_and_in_order(form: Callable[..., str], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert read(form(low)) <= read(form(high)) * (1 + 1e-12), (form(low), form(high))
    assert read(form(one)) == pytest.approx(one, rel=0.00501) and form(None) == "–"


@given(st.integers(1, 2**50))
def test_a_formatted_size_is_parsed(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.00501, abs=1)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "of 1", "50%"), (1e-5, "of 1", "<0.01%"), (0.0, "of 1", "0%"), (0.25, "", "0.25"),
        (2048, "bytes/token", "2 KiB/token"), (0.5, "s/question", "500 ms/question"), (57.4, "ms", "57.4 ms"),
        (24.8, "tokens/s", "24.8 tokens/s"), (4.33e11, "FLOP/s", "433 GFLOP/s"), (1023.8 * 2**10, "bytes", "1 MiB"),
        (0.9996, "s", "1 s"), (1234.5, "tokens", "1,234 tokens"), (None, "s", "–"), (0.0, "s", "0 s"),
        (0, "bytes", "0 B"), (math.nan, "s", "–"), (math.nan, "of 1", "–"),
    ],
)  # fmt: skip
def test_quantities_of_each_unit(value: float | None, unit: str, text: str) -> None:
    assert format_quantity(value, unit) == text
