"""Initial settings of the playground, and settings that do not apply to a single request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.widgets.playground.kept_runners import KeptRunners

PROMPT = "def fibonacci(n):\n"
QUESTION = "What does this model make of this prompt?"
# The prompt has a control of its own; the others are for runs of many, or for verdicts on them.
LEFT = frozenset({"question", "workload", "measure", "variants", "sweep", "judge", "executor:simulated"})


def known() -> dict[str, tuple[str, ...]]:
    """Texts that are offered where a setting may be any."""
    from compiled_kernels import Lane
    from compiled_kernels.lanes import AUTO
    from workbench.engine.load import SHIPPED

    lanes, models = (*map(str, Lane), AUTO), tuple(SHIPPED)
    return {"lane": lanes, "model.name": models, "speculate.model": models, "speculate.lane": lanes}


def one(prompt: str) -> dict[str, Any]:
    """The workload of a single prompt."""
    return {"kind": "prompts", "prompts": [prompt]}


def beginning(given: Any, prompt: str | None, runners: KeptRunners) -> Any:
    """The experiment that `given` stands for, of one prompt. WorkbenchError for what stands for none."""
    from workbench.study.experiment import Experiment, PromptsWorkload

    found = _experiment(given, runners)
    texts = found.workload.prompts if isinstance(found.workload, PromptsWorkload) else (PROMPT,)
    values = found.model_dump(mode="json", exclude={"variants", "sweep", "judge", "workload"})
    if values["executor"]["kind"] == "simulated":
        raise WorkbenchError("executor: a simulated one computes no tokens; play one whose executor is real")
    return Experiment.of({**values, "workload": one(texts[0] if prompt is None else prompt)})


def _experiment(given: Any, runners: KeptRunners) -> Any:
    from workbench.engine.runner import Runner
    from workbench.study.described import described
    from workbench.study.experiment import Experiment

    plain: dict[str, Any] = {"question": QUESTION, "lane": "eager", "workload": one(PROMPT)}
    if given is None:
        return Experiment.of(plain)
    if isinstance(given, Runner):
        found = described(given, QUESTION, plain["workload"])
        runners.put(found, given)
        return found
    if isinstance(given, Experiment):
        return given
    if isinstance(given, str | Path) and Path(given).suffix in (".yaml", ".yml"):
        return Experiment.read(given)
    if isinstance(given, str | Path):
        return Experiment.of({**plain, "model": {"name": str(given)}})
    raise WorkbenchError(f"Playground: give an Experiment, a YAML file, a model's name or a runner, not {given!r}")
