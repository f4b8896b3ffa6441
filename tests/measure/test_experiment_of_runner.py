"""A runner's experiment is the one that `runner_for` was given."""

from __future__ import annotations

import pytest

from workbench.engine.load import load
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.build import experiment_of_runner, runner_for
from workbench.experiment.experiment import Experiment

WORKLOAD = {"kind": "prompts", "prompts": ["a"]}
RADIX = {"kind": "radix", "ttl": 3.0}
CHANGES = (
    {},
    {"cache": {"format": "int8", "quant_group": 16, "page_size": 32, "pages": 40, "prefix": RADIX}},
    {
        "cache": {"evict": {"kind": "snapkv", "budget": 64}},
        "schedule": {"policy": {"kind": "priority", "starvation_limit": 9}},
    },
    {"attention": {"sliding_window": 64, "num_sink_tokens": 2}, "schedule": {"kind": "static", "max_num_seqs": 3}},
    {"speculate": {"kind": "prompt_lookup", "max_ngram": 3}, "model": {"dtype": "float32", "weights": "int8"}},
    {"executor": {"kind": "uncached", "oracle": True}},
)


@pytest.mark.parametrize("changes", CHANGES)
def test_what_a_runner_was_made_for_is_what_it_is_said_to_be(changes: dict) -> None:
    experiment = Experiment.from_values({"question": "q", "backend": "eager", "workload": WORKLOAD, **changes})
    assert experiment_of_runner(runner_for(experiment), "q", WORKLOAD) == experiment


def test_the_arguments_of_load_are_returned_as_an_experiments_settings() -> None:
    runner = load("demo-draft", backend="eager", cache="int8", prefix="radix", schedule="static", evict=None)
    made = experiment_of_runner(runner, "q", WORKLOAD)
    assert (made.model.name, made.cache.format, made.cache.prefix.kind) == ("demo-draft", "int8", "radix")
    assert made.schedule.kind == "static" and made.backend == "eager"


def test_a_runner_put_together_by_hand_has_no_experiment() -> None:
    with pytest.raises(WorkbenchError, match="built by hand"):
        experiment_of_runner(Runner(model=LoadedModel(load("demo-draft", backend="eager").model)), "q", WORKLOAD)
