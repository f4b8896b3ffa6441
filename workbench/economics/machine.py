"""Cost of tokens on a machine that is paid by the hour."""

from __future__ import annotations

from fractions import Fraction

from workbench.economics.prices import MILLION
from workbench.errors import WorkbenchError

HOUR = 3600


def cost_per_million(price_per_hour: float | Fraction, tokens_per_s: float | Fraction) -> Fraction:
    """Return the exact cost of a million tokens: price an hour / (3600 s x tokens a second) x 10^6."""
    if price_per_hour < 0 or tokens_per_s <= 0:
        raise WorkbenchError(f"{price_per_hour} an hour at {tokens_per_s} tokens/s: give 0 or more, and a rate above 0")
    return Fraction(price_per_hour) / (HOUR * Fraction(tokens_per_s)) * MILLION


def output_input_cost_ratio(prefill_tokens_per_s: float, decode_tokens_per_s: float) -> float:
    """Return the cost ratio of an output token to an input token on a machine that is paid by time."""
    if prefill_tokens_per_s <= 0 or decode_tokens_per_s <= 0:
        raise WorkbenchError(
            f"{prefill_tokens_per_s} tokens/s in, {decode_tokens_per_s} out: rates must be above 0"
        )
    return prefill_tokens_per_s / decode_tokens_per_s


def break_even_tokens_per_s(price_per_hour: float | Fraction, price_per_million: float | Fraction) -> Fraction:
    """Return the tokens a second at which the machine costs no more than a price per million."""
    if price_per_hour < 0 or price_per_million <= 0:
        raise WorkbenchError(f"{price_per_hour} an hour against {price_per_million} a million: give a price above 0")
    return Fraction(price_per_hour) / (HOUR * Fraction(price_per_million)) * MILLION
