"""Label compared runs by the settings that differ between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from workbench.records.item import ComparedRun

SEED = "seed"
EMPTY_VALUES = {"null", "false", "[]", "{}"}


def label_runs(items: Sequence[ComparedRun]) -> list[str]:
    """Return a label for each run: the settings in which it differs from the first.

    The first run has those that others change. Where no setting differs, the variant's name, the environment, and at
    last the run's own name tell labels apart. A setting that a record does not have (of an older version) does not
    count as different.
    """
    settings = [_as_texts(item.settings) for item in items]
    base, names = settings[0], _differing(settings)
    found = [_label({name: base[name] for name in names if name in base and base[name] not in EMPTY_VALUES})]
    for each in settings[1:]:
        found.append(_label({name: each[name] for name in names if name in each and each[name] != base.get(name)}))
    for finer in ([item.variant or "" for item in items], _environment_labels(items), [item.name for item in items]):
        twice = {label for label in found if not label or found.count(label) > 1}
        found = [f"{label} {more}".strip() if label in twice else label
                 for label, more in zip(found, finer, strict=True)]  # fmt: skip
    return found


def _label(settings: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def repetition_key(item: ComparedRun) -> str:
    """Return one text for runs that repeat each other: their settings without seeds, and their environment."""
    kept = {name: value for name, value in item.settings.items() if name.split(".")[-1] != SEED}
    return json.dumps([kept, dict(item.environment), item.variant], sort_keys=True, default=str)


def _environment_labels(items: Sequence[ComparedRun]) -> list[str]:
    around = [dict(item.environment) for item in items]
    names = _differing(around)
    return [_label({name: each[name] for name in names}) for each in around]


def _differing(values: Sequence[dict[str, str]]) -> list[str]:
    names = dict.fromkeys(name for each in values for name in each)
    return [name for name in names if len({each[name] for each in values if name in each}) > 1]


def _as_texts(settings: Any) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
