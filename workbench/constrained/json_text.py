"""Limit the digits of numbers in a JSON answer, which a model may otherwise repeat for ever.

A digit beyond the limit is forbidden, unless the grammar allows nothing else (an `enum` with a longer number) or the
text is not a JSON number: a string, or text outside of the grammar's JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.constrained.spelling import BYTES

MAX_DIGITS = 20  # consecutive digits: enough for 2^64, and more than a float64 has
DIGITS = b"0123456789"
AFTER_DIGITS = DIGITS + b".eE,}] \n\r\t"
QUOTE, BACKSLASH = b'"\\'


class JsonPlace(NamedTuple):
    """The position in a JSON text: whether it is within a string, and the number of digits directly before it."""

    in_string: bool = False
    is_escaped: bool = False
    digits: int = 0

    def after(self, symbols: Iterable[int]) -> JsonPlace:
        """Return the position after `symbols`; a control token is outside of strings."""
        in_string, is_escaped, digits = self
        for symbol in symbols:
            if symbol >= BYTES:
                in_string, is_escaped, digits = False, False, 0
            elif in_string:
                in_string = is_escaped or symbol != QUOTE
                is_escaped = symbol == BACKSLASH and not is_escaped
            else:
                in_string, digits = symbol == QUOTE, digits + 1 if symbol in DIGITS else 0
        return JsonPlace(in_string, is_escaped, digits)


class DigitMasks:
    """The tokens of a vocabulary by the number of digits with which their text begins; `controls` are control tokens,
    which have no text.
    """

    def __init__(self, token_bytes: Sequence[bytes], controls: Iterable[int]):
        leading = [len(each) - len(each.lstrip(DIGITS)) for each in token_bytes]
        self._leading = np.array(leading, np.int64)
        self._most = int(self._leading.max(initial=0))
        self._is_other = np.array([bool(each) and each[0] not in AFTER_DIGITS for each in token_bytes], np.bool_)
        self._is_other[[*controls]] = False

    def ban(self, place: JsonPlace, banned: NDArray[np.bool_]) -> None:
        """Forbid, in a row of a grammar's mask, tokens that extend a number at `place` beyond MAX_DIGITS digits."""
        if place.in_string or place.digits + self._most <= MAX_DIGITS or not place.digits:
            return
        allowed = ~banned[: len(self._leading)]
        over = self._leading > MAX_DIGITS - place.digits
        if (allowed & ~over).any() and not (allowed & self._is_other).any():
            banned[: len(self._leading)] |= over & (self._leading > 0)
