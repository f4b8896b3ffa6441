"""An experiment's variants: the experiments they are, the one all are held against, and their names for a table."""

from __future__ import annotations

import json

from workbench.study.experiment import Experiment

REFERENCE = "float32"
AS_GIVEN = "as given"


def every_variant(experiment: Experiment) -> dict[str, Experiment]:
    """Each variant by name, checked: WorkbenchError names the variant and the path that is wrong. Without variants the
    experiment is its only one, `as given`."""
    if not experiment.variants:
        return {AS_GIVEN: experiment.alone({}, AS_GIVEN)}
    return {name: experiment.variant(name) for name in experiment.variants}


def reference_of(experiment: Experiment) -> Experiment:
    """The same model in float32 as it was trained, with a dense cache and dense weights, on the lane eager."""
    values = experiment.model_dump(mode="json", exclude={"variants", "sweep", "judge"})
    values["model"] |= {"dtype": "float32", "weights": "dense", "head_weights": None, "activations": "float"}
    kept = {"page_size", "pages"}
    values["cache"] = {name: value for name, value in values["cache"].items() if name in kept}
    values["attention"] = {}
    values["lane"] = "eager"
    return Experiment.of(values, "reference")


def settings_text(experiment: Experiment, name: str) -> str:
    """What a variant changes, on one line."""
    changes = experiment.variants.get(name, {})
    return " ".join(
        f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in changes.items()
    )
