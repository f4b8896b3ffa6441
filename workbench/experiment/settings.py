"""Define the settings of an experiment's sweep: axes, linked settings, overrides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from workbench.settings import Count, Settings

UNSWEEPABLE_SETTINGS = ("variants", "sweep", "judge")
Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class Sweep(Settings):
    """Settings of a sweep, which runs every combination of them.

    A point is one value of each of the `axes`, one index into each group of `linked` settings (lists of equal length
    that advance together), and one of the `overrides`.

        axes: {cache.format: [dense, int8], workload.context: [256, 512]}
        linked: [{schedule.max_num_seqs: [1, 8], workload.requests: [4, 32]}]
        overrides: [{}, {attention.sliding_window: 64, attention.num_sink_tokens: 4}]
        repeat: 3"""

    axes: dict[str, Values] = {}
    linked: tuple[dict[str, Values], ...] = ()
    overrides: tuple[dict[str, Any], ...] = ()
    repeat: Count = 1  # number of repetitions of the whole sweep, each with other seeds

    @field_validator("linked")
    @classmethod
    def _one_length(cls, groups: tuple[dict[str, Values], ...]) -> tuple[dict[str, Values], ...]:
        for group in groups:
            if len({len(values) for values in group.values()}) > 1:
                lengths = ", ".join(f"{path} has {len(values)}" for path, values in group.items())
                raise ValueError(f"linked settings advance together and need the same number of values: {lengths}")
        return groups

    @model_validator(mode="after")
    def _once(self) -> Sweep:
        taken: list[str] = []
        for group in self.groups():
            for path in group:
                if path.split(".")[0] in UNSWEEPABLE_SETTINGS:
                    raise ValueError(f"{path} is not a setting of a single run and cannot be swept")
                if (other := next((each for each in taken if paths_overlap(each, path)), None)) is not None:
                    raise ValueError(f"{path} is swept twice" + (f", within {other}" if other != path else ""))
            taken += group
        return self

    def groups(self) -> Iterator[list[str]]:
        """Yield for each axis, group of linked settings, and the overrides the list of paths that it sets."""
        yield from ([path] for path in self.axes)
        yield from (list(group) for group in self.linked)
        yield list(dict.fromkeys(path for each in self.overrides for path in each))

    @property
    def one_axis(self) -> tuple[str, tuple[Any, ...]] | None:
        """Return the axis as (path, values) if the sweep consists of exactly one; else None."""
        plain = len(self.axes) == 1 and not self.linked and not self.overrides and self.repeat == 1
        return next(iter(self.axes.items())) if plain else None


def paths_overlap(one: str, other: str) -> bool:
    """Return whether one dotted path equals the other or is its prefix."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
