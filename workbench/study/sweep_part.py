"""Settings of a sweep: settings that take several values, together or each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from workbench.study.parts import Count, ExperimentSettings

UNSWEEPABLE_SETTINGS = ("variants", "sweep", "judge")
Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class Sweep(ExperimentSettings):
    """A sweep runs every combination of its settings.

    A point is one value of each of the `axes`, one index into each group of `linked` settings (lists of one length that
    advance together), and one of the `overrides`.

        axes: {cache.format: [dense, int8], workload.context: [256, 512]}
        linked: [{schedule.max_num_seqs: [1, 8], workload.requests: [4, 32]}]
        overrides: [{}, {attention.window: 64, attention.sinks: 4}]
        repeat: 3"""

    axes: dict[str, Values] = {}
    linked: tuple[dict[str, Values], ...] = ()
    overrides: tuple[dict[str, Any], ...] = ()
    repeat: Count = 1  # all of it so many times, with other seeds

    @field_validator("linked")
    @classmethod
    def _one_length(cls, groups: tuple[dict[str, Values], ...]) -> tuple[dict[str, Values], ...]:
        for group in groups:
            if len({len(values) for values in group.values()}) > 1:
                told = ", ".join(f"{path} has {len(values)}" for path, values in group.items())
                raise ValueError(f"linked settings advance together and need equally many values: {told}")
        return groups

    @model_validator(mode="after")
    def _once(self) -> Sweep:
        taken: list[str] = []
        for group in self.groups():
            for path in group:
                if path.split(".")[0] in UNSWEEPABLE_SETTINGS:
                    raise ValueError(f"{path} is no setting of a point and cannot be swept")
                if (other := next((each for each in taken if paths_overlap(each, path)), None)) is not None:
                    raise ValueError(f"{path} is swept twice" + (f", within {other}" if other != path else ""))
            taken += group
        return self

    def groups(self) -> Iterator[list[str]]:
        """Yield the paths that each axis sets, in the order of the axes."""
        yield from ([path] for path in self.axes)
        yield from (list(group) for group in self.linked)
        yield list(dict.fromkeys(path for each in self.overrides for path in each))

    @property
    def one_axis(self) -> tuple[str, tuple[Any, ...]] | None:
        """Return the axis as (path, values) if it is the only one; else None."""
        plain = len(self.axes) == 1 and not self.linked and not self.overrides and self.repeat == 1
        return next(iter(self.axes.items())) if plain else None


def paths_overlap(one: str, other: str) -> bool:
    """Return whether one dotted path equals the other or is its prefix."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
