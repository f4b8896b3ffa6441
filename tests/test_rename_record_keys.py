"""Records keep every figure when their keys are renamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.rename_record_keys import current, rewritten
from workbench.experiment.experiment import Experiment

NAMES = {"lane": "backend", "set_back": "preempted", "groups": "num_kv_heads"}
RECORDS = sorted((Path(__file__).resolve().parents[1] / "experiments" / "records").glob("*.json"))

words = st.sampled_from([*NAMES, "cache", "x", "lanes", "a lane", "attention.groups", "lane=eager", "q\nlane: mlir\n"])
values = st.recursive(
    st.one_of(words, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(values)
def test_names_change_and_figures_stay(value: object) -> None:
    text = json.dumps(value, indent=1)
    try:
        made = rewritten(text, NAMES)
    except ValueError:  # the law of two keys
        return
    assert rewritten(made, NAMES) == made
    assert made.count("\n") == text.count("\n")
    assert rewritten(text, {}) == text


def test_keys_paths_settings_and_events_are_renamed() -> None:
    experiment = "lane: auto\nattention:\n  groups: null\n"
    record = {"lane": "mlir", "set": "attention.groups=1", "experiment": experiment, "n": 1.0}
    made = json.loads(rewritten(json.dumps(record), NAMES))
    assert made["backend"] == "mlir" and made["set"] == "attention.num_kv_heads=1" and made["n"] == 1.0
    assert made["experiment"] == "backend: auto\nattention:\n  num_kv_heads: null\n"


def test_two_keys_never_become_one() -> None:
    with pytest.raises(ValueError, match="two keys"):
        rewritten('{"lane": 1, "backend": 2}', NAMES)


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_committed_record_holds_no_old_name(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert current(text) == text


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_the_experiment_of_a_committed_record_can_be_read(file: Path) -> None:
    record = json.loads(file.read_text(encoding="utf-8"))
    asked = record.get("experiment")
    if isinstance(asked, str) and "\n" in asked:
        Experiment.from_yaml(asked)
    elif isinstance(asked, dict):
        Experiment.from_values(asked)
