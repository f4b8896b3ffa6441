"""The reference that variants are judged by is the same, whatever precision they ask for."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.experiment.experiment import Experiment
from workbench.experiment.variants import reference_experiment

PLAIN: dict[str, Any] = {
    "question": "Is it as good?", "model": {"name": "shape:tiny"}, "workload": {"kind": "random", "requests": 1},
}  # fmt: skip


def reference_of(**changes: dict[str, Any]) -> Experiment:
    merged = {group: {**PLAIN.get(group, {}), **values} for group, values in changes.items()}
    return reference_experiment(Experiment.from_values({**PLAIN, **merged}))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dtype": "bfloat16"}},
        {"model": {"weights": "int8"}},
        {"model": {"weights": "int8", "activations": "int8"}},
        {"model": {"weights": "int4", "weight_group": 32}},
        {"model": {"head_weights": "int8"}},
        {"model": {"expert_weights": "int8"}},
        {"cache": {"format": "int8"}},
    ],
    ids=str,
)
def test_no_setting_of_precision_reaches_the_reference(changes: dict[str, dict[str, Any]]) -> None:
    assert reference_of(**changes) == reference_of()
