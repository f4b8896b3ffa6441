"""Derive the variants of an experiment, their common reference, and the description of their settings."""

from __future__ import annotations

import json

from workbench.experiment.experiment import Experiment

REFERENCE = "float32"
AS_GIVEN = "as given"


def every_variant(experiment: Experiment) -> dict[str, Experiment]:
    """Return each variant's experiment by name. Without variants return the experiment itself under the name `as
    given`.

    Raises WorkbenchError with the name of the variant and the wrong path."""
    if not experiment.variants:
        return {AS_GIVEN: experiment.single({}, AS_GIVEN)}
    return {name: experiment.variant(name) for name in experiment.variants}


def reference_experiment(experiment: Experiment) -> Experiment:
    """Return the reference experiment: the same model in float32 with unchanged attention, dense cache and weights, and
    eager backend.
    """
    values = experiment.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
    values["model"] |= {"dtype": "float32", "weights": "dense", "head_weights": None, "activations": "float"}
    values["model"] |= {"expert_weights": None, "weight_group": 64}
    kept = {"page_size", "pages"}
    values["cache"] = {name: value for name, value in values["cache"].items() if name in kept}
    values["attention"] = {}
    values["backend"] = "eager"
    return Experiment.from_values(values, "reference")


def settings_text(experiment: Experiment, name: str) -> str:
    """Return the settings that a variant changes, as one line of text."""
    changes = experiment.variants.get(name, {})
    return " ".join(
        f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in changes.items()
    )


def described(experiment: Experiment, name: str, backend: object) -> dict[str, str]:
    """Return the first columns of a measured variant's row, as a mapping: its name and settings."""
    return {"variant": name, "settings": settings_text(experiment, name), "backend": str(backend)}
