"""Define the playground's initial settings and the settings that it leaves out, and write non-default settings as
Python."""

from __future__ import annotations

import pprint
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.widgets.playground.runners import RunnerCache

# Long enough to show differences: a quantized cache is smaller than a dense one from about 200 tokens on (its newest
# tokens stay in full precision), and without a cache each step computes all tokens again.
DEFAULT_PROMPT = '''\
"""Small functions on whole numbers."""


def is_even(number):
    """Return True if the number is even."""
    return number % 2 == 0


def is_prime(number):
    """Return True if the number is prime."""
    if number < 2:
        return False
    for divisor in range(2, number):
        if number % divisor == 0:
            return False
    return True


def factorial(number):
    """Return the product of all numbers from 1 to number."""
    result = 1
    for factor in range(1, number + 1):
        result = result * factor
    return result


def greatest_common_divisor(first, second):
    """Return the largest number that divides both."""
    while second != 0:
        first, second = second, first % second
    return first


def digits(number):
    """Return the digits of the number, the last one first."""
    result = []
    while number > 0:
        result.append(number % 10)
        number = number // 10
    return result


def fibonacci(number):
'''
QUESTION = "What does this model make of this prompt?"
READABLE_TEMPERATURE = 0.7  # at 1 a small model's text soon becomes nonsense
# The prompt (workload) has its own control; the others apply to runs of many requests, or to verdicts.
EXCLUDED_SETTINGS = frozenset({"question", "workload", "measure", "variants", "sweep", "judge", "executor:simulated"})
SCRIPT_TEMPLATE = """\
import workbench

experiment = workbench.Experiment.from_values({values})
runner = workbench.runner_for(experiment)
for event in runner.stream(experiment.workload.prompts, **dict(experiment.sampling)):
    print(event.text, end="", flush=True)
"""


def setting_suggestions() -> dict[str, tuple[str, ...]]:
    """Return suggested values for settings that are texts, by dotted path."""
    from compiled_kernels import Backend
    from compiled_kernels.backends import AUTO_BACKEND
    from workbench.engine.loaded_model import BUNDLED_MODELS

    backends, models = (*map(str, Backend), AUTO_BACKEND), tuple(BUNDLED_MODELS)
    return {"backend": backends, "model.name": models, "speculate.model": models, "speculate.backend": backends}


def single_prompt_workload(prompt: str) -> dict[str, Any]:
    """Return the workload of a single prompt, as JSON."""
    return {"kind": "prompts", "prompts": [prompt]}


def initial_experiment(given: Any, prompt: str | None, runners: RunnerCache) -> Any:
    """Return an experiment with the settings of `given` and a single prompt.

    Args:
        given: an Experiment, the path of its YAML file, a model's name, a runner, or None for the demo model.
        prompt: the prompt; None for the first prompt of `given`, or else a default.
        runners: cache to which a given runner is added.

    Raises:
        WorkbenchError: `given` is something else, or its executor is simulated.
    """
    from workbench.experiment.experiment import Experiment

    found = _experiment(given, runners)
    texts = found.workload.prompts if found.workload.kind == "prompts" else (DEFAULT_PROMPT,)
    values = found.model_dump(mode="json", exclude={"variants", "sweep", "judge", "workload"})
    if values["executor"]["kind"] == "simulated":
        raise WorkbenchError("executor: a simulated executor computes no tokens; give an experiment with a real one")
    return Experiment.from_values(
        {**values, "workload": single_prompt_workload(texts[0] if prompt is None else prompt)}
    )


def _experiment(given: Any, runners: RunnerCache) -> Any:
    from workbench.engine.runner import Runner
    from workbench.experiment.build import experiment_of_runner
    from workbench.experiment.experiment import Experiment

    plain: dict[str, Any] = {
        "question": QUESTION,
        "backend": "eager",
        "sampling": {"temperature": READABLE_TEMPERATURE},
        "workload": single_prompt_workload(DEFAULT_PROMPT),
    }
    if given is None:
        return Experiment.from_values(plain)
    if isinstance(given, Runner):
        found = experiment_of_runner(given, QUESTION, plain["workload"])
        runners.put(found, given)
        return found.with_(f"sampling.temperature={READABLE_TEMPERATURE}")
    if isinstance(given, Experiment):
        return given
    if isinstance(given, str | Path) and Path(given).suffix in (".yaml", ".yml"):
        return Experiment.from_file(given)
    if isinstance(given, str | Path):
        return Experiment.from_values({**plain, "model": {"name": str(given)}})
    raise WorkbenchError(f"Playground: pass an Experiment, a YAML file, a model's name or a runner, not {given!r}")


def as_python(experiment: Any) -> str:
    """Return a Python script that generates the same tokens as the experiment."""
    values, plain = experiment.model_dump(mode="json"), type(experiment).model_construct().model_dump(mode="json")
    needed = {name for name, field in type(experiment).model_fields.items() if field.is_required()}
    short = non_default(values, {name: value for name, value in plain.items() if name not in needed})
    return SCRIPT_TEMPLATE.format(values=pprint.pformat(short, width=100, sort_dicts=False))


def non_default(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the `values` that differ from `defaults`, also within groups of the same kind, each of which keeps its
    `kind`."""
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
