"""Build the runner and the requests of an experiment, and the experiment that describes a given runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.engine.runner import Runner
from workbench.engine.uncached import disable_cache, executor_settings
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.progress import to_stderr
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request
from workbench.settings import Settings
from workbench.simulate.executor_settings import UncachedExecutor
from workbench.simulate.traffic_settings import ClosedLoop


def requests_of(experiment: Experiment, tokenizer: Tokenizer | None, vocab: int) -> list[Request]:
    """Build the experiment's requests, the same on every call. A text that cannot be tokenized becomes a request that
    the engine refuses."""
    return experiment.workload.build_requests(experiment, tokenizer, vocab)


def clients_of(experiment: Experiment) -> tuple[int, float] | None:
    """Return the number of closed-loop clients and the pause of each between requests in seconds; None if requests have
    arrival times.
    """
    arrivals = getattr(experiment.workload, "arrivals", None)
    if not isinstance(arrivals, ClosedLoop):
        return None
    return arrivals.clients, arrivals.think * getattr(experiment.workload, "time", 1.0)


def runner_for(experiment: Experiment, on_progress: Callable[[str], None] = to_stderr, **arguments: Any) -> Runner:
    """Build the runner of an experiment. Other `arguments` (clock, listener, ...) are passed on to `Runner`.

    experiment = workbench.Experiment.from_file("experiments/first_light.yaml")
    runner = workbench.runner_for(experiment)
    """
    runner = Runner(experiment, report=on_progress, **arguments)
    if isinstance(experiment.executor, UncachedExecutor):
        disable_cache(runner, experiment.executor.oracle)
    return runner


def experiment_of_runner(runner: Runner, question: str, workload: Mapping[str, Any]) -> Experiment:
    """Return the experiment whose settings build `runner`.

    Raises:
        WorkbenchError: if no settings describe the runner: its model was built by hand, or its policy is a user's
            object.
    """
    config, executor = runner.config, executor_settings(runner.core.executor)
    policies = {"schedule.policy": config.schedule.policy, "cache.evict": config.cache.evict}
    own = [name for name, value in policies.items() if value is not None and not isinstance(value, Settings)]
    if not runner.is_from_config or own:
        what = f"its {own[0]} is an object without settings" if own else "its model was built by hand"
        raise WorkbenchError(f"no settings describe this runner, because {what}: pass an Experiment instead")
    values = {"question": question, **config.model_dump(mode="json"), "workload": dict(workload), "executor": executor}
    return Experiment.from_values(values, "this runner")
