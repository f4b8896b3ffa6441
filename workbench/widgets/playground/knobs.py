"""Initial settings of the playground, and settings that do not apply to a single request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.widgets.playground.kept_runners import RunnerCache

DEFAULT_PROMPT = "def fibonacci(n):\n"
QUESTION = "What does this model make of this prompt?"
# The prompt has a control of its own; the others are for runs of many, or for verdicts on them.
EXCLUDED_SETTINGS = frozenset({"question", "workload", "measure", "variants", "sweep", "judge", "executor:simulated"})


def setting_suggestions() -> dict[str, tuple[str, ...]]:
    """Texts that are offered where a setting may be any."""
    from compiled_kernels import Backend
    from compiled_kernels.backends import AUTO_BACKEND
    from workbench.engine.load import BUNDLED_MODELS

    backends, models = (*map(str, Backend), AUTO_BACKEND), tuple(BUNDLED_MODELS)
    return {"backend": backends, "model.name": models, "speculate.model": models, "speculate.backend": backends}


def single_prompt_workload(prompt: str) -> dict[str, Any]:
    """The workload of a single prompt."""
    return {"kind": "prompts", "prompts": [prompt]}


def initial_experiment(given: Any, prompt: str | None, runners: RunnerCache) -> Any:
    """The experiment that `given` stands for, of one prompt. WorkbenchError for what stands for none."""
    from workbench.study.experiment import Experiment, PromptsWorkload

    found = _experiment(given, runners)
    texts = found.workload.prompts if isinstance(found.workload, PromptsWorkload) else (DEFAULT_PROMPT,)
    values = found.model_dump(mode="json", exclude={"variants", "sweep", "judge", "workload"})
    if values["executor"]["kind"] == "simulated":
        raise WorkbenchError("executor: a simulated one computes no tokens; play one whose executor is real")
    return Experiment.from_values({**values, "workload": single_prompt_workload(texts[0] if prompt is None else prompt)})


def _experiment(given: Any, runners: RunnerCache) -> Any:
    from workbench.engine.runner import Runner
    from workbench.study.described import experiment_of_runner
    from workbench.study.experiment import Experiment

    plain: dict[str, Any] = {"question": QUESTION, "backend": "eager", "workload": single_prompt_workload(DEFAULT_PROMPT)}
    if given is None:
        return Experiment.from_values(plain)
    if isinstance(given, Runner):
        found = experiment_of_runner(given, QUESTION, plain["workload"])
        runners.put(found, given)
        return found
    if isinstance(given, Experiment):
        return given
    if isinstance(given, str | Path) and Path(given).suffix in (".yaml", ".yml"):
        return Experiment.from_file(given)
    if isinstance(given, str | Path):
        return Experiment.from_values({**plain, "model": {"name": str(given)}})
    raise WorkbenchError(f"Playground: give an Experiment, a YAML file, a model's name or a runner, not {given!r}")
