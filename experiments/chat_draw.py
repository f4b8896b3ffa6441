"""Draw phrases, numbers, functions and units for one side of demo-chat's conversations: training, or held out.

A number from 10 on, a phrase or a documented name belongs to one side only, chosen by the SHA-256 of its text. The ten
digits belong to both sides.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Literal

from experiments import chat_phrases as phrases
from workbench.agents import demo_tools

Side = Literal["training", "held_out"]
HELD_OUT_NUMBER, HELD_OUT_FUNCTION = 8, 10  # one in so many
SPELLINGS = {  # units as people write them, by measure; the tool reads them all
    "length": ("mm", "cm", "m", "km", "inches", "feet", "yards", "miles", "metres", "meters", "kilometres"),
    "mass": ("mg", "g", "kg", "tonnes", "ounces", "pounds", "grams", "kilograms"),
    "time": ("milliseconds", "seconds", "minutes", "hours", "days", "weeks"),
    "volume": ("ml", "litres", "liters", "pints", "gallons", "cups"),
    "data": ("bits", "bytes", "kilobytes", "megabytes", "gigabytes"),
    "temperature": ("celsius", "fahrenheit", "kelvin"),
}


def is_held_out(text: str, one_in: int) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % one_in == 0


@cache
def functions() -> dict[Side, tuple[str, ...]]:
    """Return documented names of the standard library by side of the split."""
    found = []
    for name in (*demo_tools.MODULES, *demo_tools.TYPES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # modules warn of names that will go
            members = dir(demo_tools.TYPES.get(name) or importlib.import_module(name))
            for member in members:
                text = demo_tools.documentation(f"{name}.{member}")
                if text and 15 <= len(text) <= 90 and text.isascii():
                    found.append(f"{name}.{member}")
    sides: dict[Side, tuple[str, ...]] = {
        "training": tuple(name for name in found if not is_held_out(name, HELD_OUT_FUNCTION)),
        "held_out": tuple(name for name in found if is_held_out(name, HELD_OUT_FUNCTION)),
    }
    return sides


class Draw:
    """Random choices of phrases, numbers, functions and units on one side of the split, training or held out."""

    def __init__(self, side: Side, seed: str):
        self.side: Side = side
        self.rng = random.Random(f"{side} {seed}")

    def choice(self, options: Sequence[str]) -> str:
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def phrase(self, options: tuple[str, ...]) -> str:
        training, held_out = phrases.split(options)
        return self.choice(held_out if self.side == "held_out" else training)

    def nested(self, frames: tuple[str, ...], inner: tuple[str, ...]) -> tuple[str, str]:
        """Return a frame and the phrase that fills it; on the held-out side at least one of the two is held out."""
        if self.side == "training":
            return self.phrase(frames), self.phrase(inner)
        which = self.rng.randrange(3)
        known_frames, known_inner = phrases.split(frames)[0], phrases.split(inner)[0]
        frame = self.choice(known_frames) if which == 0 else self.phrase(frames)
        return frame, self.choice(known_inner) if which == 1 else self.phrase(inner)

    def number(self, digits: int = 4, decimals: bool = False) -> str:
        """Return a number of up to `digits` digits; on the held-out side a held-out number, or a single digit."""
        size, exact = self.rng.randint(1, digits), not (decimals and self.chance(0.3))
        while True:
            text = str(self.rng.randrange(10 ** (size - 1) + (size == 1), 10**size))
            if not exact:
                text += f".{self.rng.randrange(1, 100):02d}".rstrip("0")
            if self.allows(text):
                return text

    def allows(self, number: str) -> bool:
        return len(number) == 1 or is_held_out(number, HELD_OUT_NUMBER) == (self.side == "held_out")

    def function(self) -> str:
        return self.choice(functions()[self.side])

    def units(self, count: int = 2) -> list[str]:
        """Return `count` different units of one measure, such as length. Temperatures come only in twos, since they
        cannot be added."""
        names = SPELLINGS[self.choice([measure for measure in SPELLINGS if count == 2 or measure != "temperature"])]
        while True:
            found = self.rng.sample(names, count)
            if len({demo_tools.UNITS[name][1] for name in found}) == count:
                return found
