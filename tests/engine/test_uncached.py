"""A runner without its cache says the same, and computes every text from its beginning."""

from __future__ import annotations

import pytest
import torch

from workbench.engine.load import load
from workbench.engine.runner import Runner, generate
from workbench.engine.uncached import disable_cache, executor_settings
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.request import Request, SamplingParameters

TINY = {"dtype": "float32", "backend": "eager", "page_size": 8, "max_num_batched_tokens": 16}
PROMPTS = (tuple(range(40)), tuple(range(7)), tuple(range(50, 60)))


def outputs(runner: Runner) -> list[tuple[int, ...]]:
    sampling = SamplingParameters(temperature=0, max_tokens=9)
    ends = generate(runner, [Request(str(i), ids, sampling) for i, ids in enumerate(PROMPTS)])
    assert all(end.reason == "length" for end in ends.values())
    return [ends[str(i)].token_ids for i in range(len(PROMPTS))]


@pytest.mark.parametrize("oracle", [False, True])
def test_the_same_tokens(oracle: bool) -> None:
    plain, anew = load("shape:tiny", **TINY), load("shape:tiny", **TINY)
    disable_cache(anew, oracle)
    assert outputs(plain) == outputs(anew)


def test_what_stands_in_the_pages_counts_for_nothing() -> None:
    runner = load("shape:tiny", **TINY)
    disable_cache(runner)
    expected = outputs(load("shape:tiny", **TINY))
    lengths = []

    def spoil(forward, plan):
        lengths.extend((span.start, span.length) for span in plan.spans)
        for table in range(len(runner.store.groups)):
            for pages in runner.store.page_tensors(table):
                pages.fill_(torch.nan)
        return forward(plan)

    runner.core.executor.hooks.insert(0, spoil)
    assert outputs(runner) == expected
    assert all(start == 0 for start, _ in lengths) and max(length for _, length in lengths) == 48


def test_windows_and_eviction_are_refused_but_by_the_oracle() -> None:
    runner = load("shape:tiny", attention={"sliding_window": 8}, **TINY)
    with pytest.raises(WorkbenchError, match=r"take out cache\.evict and attention\.sliding_window"):
        disable_cache(runner)
    expected = outputs(load("shape:tiny", attention={"sliding_window": 8}, **TINY))
    disable_cache(runner, oracle=True)
    assert outputs(runner) == expected


def test_an_experiment_asks_for_it() -> None:
    values = {"question": "?", "model": {"name": "shape:tiny"}, "backend": "eager", "workload": {"kind": "random"}}
    plain = runner_for(Experiment.from_values(values))
    anew = runner_for(Experiment.from_values({**values, "executor": {"kind": "uncached"}}))
    assert executor_settings(plain.core.executor) == {"kind": "real"}
    assert executor_settings(anew.core.executor) == {"kind": "uncached", "oracle": False}
