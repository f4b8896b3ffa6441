"""Write an experiment as Python, with only those settings that differ from the defaults."""

from __future__ import annotations

import pprint
from typing import Any

SCRIPT_TEMPLATE = """\
from workbench.study.experiment import Experiment
from workbench.study.run import runner_for
from workbench.study.workload import requests_of

experiment = Experiment.of({values})
runner = runner_for(experiment)
for event in runner.stream(requests_of(experiment, runner.tokenizer, runner.model.spec.vocab)):
    print(event.text, end="", flush=True)
"""


def as_python(experiment: Any) -> str:
    """A script that gives the tokens the experiment gives."""
    values, plain = experiment.model_dump(mode="json"), type(experiment).model_construct().model_dump(mode="json")
    needed = {name for name, field in type(experiment).model_fields.items() if field.is_required()}
    short = non_default(values, {name: value for name, value in plain.items() if name not in needed})
    return SCRIPT_TEMPLATE.format(values=pprint.pformat(short, width=100, sort_dicts=False))


def non_default(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Of `values` those that are not as in `plain`, inside groups of the same kind too, which say their kind."""
    short: dict[str, Any] = {}
    for name, value in values.items():
        if name in defaults and defaults[name] == value and type(defaults[name]) is type(value):
            continue
        other = defaults.get(name)
        if isinstance(value, dict) and isinstance(other, dict) and other and value.get("kind") == other.get("kind"):
            kind = {"kind": value["kind"]} if "kind" in value else {}
            short[name] = {**kind, **non_default(value, other)}
        else:
            short[name] = value
    return short
