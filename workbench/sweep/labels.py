"""Label a sweep's points by the settings that differ between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.study.experiment import Experiment
from workbench.study.variants import AS_GIVEN


@dataclass(frozen=True)
class AxisChoice:
    """One value of an axis: its settings (dotted path -> value), and its name where it is a variant."""

    settings: Mapping[str, Any]
    name: str | None = None


def label_points(experiment: Experiment, choices: Sequence[AxisChoice]) -> list[str]:
    """Return one label a choice, in their order; a variant's name replaces the settings of the variants."""
    base = experiment.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
    named = any(choice.name is not None for choice in choices)
    inside = {path for settings in experiment.variants.values() for path in settings} if named else set()
    paths = dict.fromkeys(path for choice in choices for path in choice.settings if path not in inside)
    rows = [{path: format_value(choice.settings.get(path, value_at(base, path))) for path in paths} for choice in choices]
    differing = [path for path in paths if len({row[path] for row in rows}) > 1]
    labels = []
    for choice, row in zip(choices, rows, strict=True):
        words = [] if choice.name is None else [choice.name]
        labels.append(" ".join(words + [f"{path}={row[path]}" for path in differing]) or AS_GIVEN)
    return labels


def value_at(values: Any, path: str) -> Any:
    """Return the value at a dotted path; None where there is none."""
    for piece in path.split("."):
        values = values.get(piece) if isinstance(values, Mapping) else None
    return values


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
