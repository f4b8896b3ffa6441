"""Variants of an experiment, their common reference, a text of their settings, and the result of measuring them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from workbench.experiment.experiment import Experiment

REFERENCE = "float32"
AS_GIVEN = "as given"
Rows = list[dict[str, Any]]


def every_variant(experiment: Experiment) -> dict[str, Experiment]:
    """Return each variant's experiment by name; without variants the experiment itself as `as given`.

    Raises WorkbenchError that names the variant and the wrong path."""
    if not experiment.variants:
        return {AS_GIVEN: experiment.single({}, AS_GIVEN)}
    return {name: experiment.variant(name) for name in experiment.variants}


def reference_experiment(experiment: Experiment) -> Experiment:
    """Return the reference: the same model in float32, unchanged attention, dense cache and weights, eager backend."""
    values = experiment.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
    values["model"] |= {"dtype": "float32", "weights": "dense", "head_weights": None, "activations": "float"}
    values["model"] |= {"expert_weights": None, "weight_group": 64}
    kept = {"page_size", "pages"}
    values["cache"] = {name: value for name, value in values["cache"].items() if name in kept}
    values["attention"] = {}
    values["backend"] = "eager"
    return Experiment.from_values(values, "reference")


def settings_text(experiment: Experiment, name: str) -> str:
    """Return the settings that a variant changes, on one line."""
    changes = experiment.variants.get(name, {})
    return " ".join(
        f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in changes.items()
    )


def described(experiment: Experiment, name: str, backend: object) -> dict[str, str]:
    """Return the columns with which the row of a measured variant begins."""
    return {"variant": name, "settings": settings_text(experiment, name), "backend": str(backend)}


@dataclass
class VariantResults:
    """Measured variants: one row each in `rows`, the inputs in `metadata`, the raw data behind the rows in `tables`.

    `others_cpu_share` is that of the measured rounds, where the run's own would count processes of ours that ended."""

    rows: Rows
    metadata: dict[str, Any]
    tables: dict[str, Rows] = field(default_factory=dict, repr=False)
    others_cpu_share: float | None = None
