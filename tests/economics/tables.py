"""Price tables and calls for the tests of prices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from hypothesis import strategies as st

from workbench.economics.prices import KINDS, Prices
from workbench.economics.prompt_cache import PromptCall

AMOUNTS = st.integers(0, 100_000).map(lambda thousandths: Decimal(thousandths) / 1000)


def _table(amounts: tuple[Decimal, ...]) -> Prices:
    named = dict(zip(KINDS, amounts, strict=True))
    return Prices.from_values({"name": "drawn", "source": "a test", "date": "2026-11-21"} | named)


PRICES = st.tuples(*[AMOUNTS] * len(KINDS)).map(_table)


def table(plain: str = "3", write: str = "3.75", read: str = "0.3", output: str = "15", hour: str = "6") -> Prices:
    amounts = {"input": plain, "output": output, "cache_write_5m": write, "cache_write_1h": hour, "cache_read": read}
    return Prices.from_values({"name": "made", "source": "a test", "date": "2026-11-21"} | amounts)


def cheaper(prices: Prices, kind: str, by: Decimal) -> Prices:
    return prices.model_copy(update={kind: max(Decimal(0), getattr(prices, kind) - by)})


PATHS = [path for length in range(5) for path in itertools.product((0, 1), repeat=length)]
MARKED = st.none() | st.frozensets(st.integers(1, 4))
QUARTERS = st.sampled_from([0, 400, 800, 1199, 1200]) | st.integers(0, 2000)  # lives of 300 s overlap, or end just so
STEP = st.tuples(QUARTERS, st.sampled_from(PATHS), st.integers(0, 50), st.integers(0, 50), MARKED)


def _calls(steps: Sequence[tuple[int, tuple[int, ...], int, int, frozenset[int] | None]]) -> list[PromptCall]:
    now, calls = Fraction(0), []
    for quarters, path, input, output, marked in steps:
        now += Fraction(quarters, 4)
        calls.append(PromptCall(now, tuple((name, 10 + name) for name in path), input, output, marked))
    return calls


# In order of time; their prompts begin alike more often than not.
CALLS = st.lists(STEP, max_size=20).map(_calls)
