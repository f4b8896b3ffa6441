"""The last few runners of a widget, by the experiments they carry out."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MAX_RUNNERS = 3
# What may differ between experiments that one runner serves.
PER_REQUEST_SETTINGS = {"question", "sampling", "workload", "measure", "variants", "sweep", "judge"}


class RunnerCache:
    """Runners of experiments: `get` gives one that is there, or a new one, for which the oldest may have to go. One is
    made at a time: who asks meanwhile waits, and may find there what was made."""

    def __init__(self, max_runners: int = MAX_RUNNERS):
        self._max_runners, self._runners = max_runners, OrderedDict[str, Any]()
        self._made, self._used = set[str](), set[str]()  # those that were made here, and that have run a request
        self._load_lock = threading.Lock()

    def put(self, experiment: Any, runner: Any) -> None:
        """`runner` is what the experiment describes."""
        self._runners[_key(experiment)] = runner
        self._runners.move_to_end(_key(experiment))
        while len(self._runners) > self._max_runners:
            self._runners.popitem(last=False)

    def clear(self) -> None:
        """Forget all runners; the processes of those that were made here end."""
        for key, runner in self._runners.items():
            if key in self._made:
                runner.close()
        self._runners.clear()

    def is_new(self, experiment: Any) -> bool:
        """Return whether the runner of `experiment` has run nothing that was timed."""
        return _key(experiment) not in self._used

    def mark_used(self, experiment: Any) -> None:
        self._used.add(_key(experiment))

    def get(self, experiment: Any, report: Callable[[str], None]) -> Any:
        """Return the runner of `experiment`; raise WorkbenchError where it cannot be loaded. `report` gets a line on
        what takes long, and ends it by an error of its own."""
        from workbench.experiment.build import runner_for

        if self._load_lock.locked():
            report("waiting until the runner is made that was begun before")
        with self._load_lock:
            found = self._runners.get(_key(experiment))
            if found is None:
                report("making the runner")
                shared = self._loaded_model(experiment)
                while len(self._runners) >= self._max_runners:  # before the new one takes memory
                    self._runners.popitem(last=False)
                found = runner_for(experiment, report, **({} if shared is None else {"model": shared}))
                self._made.add(_key(experiment))
                self._used.discard(_key(experiment))
            self.put(experiment, found)
            return found

    def _loaded_model(self, experiment: Any) -> Any:
        """Return a model in memory with the weights of `experiment`; None where there is none."""
        each = (runner.loaded_model.for_settings(runner.config, experiment) for runner in self._runners.values())
        return next((loaded for loaded in each if loaded is not None), None)


def _key(experiment: Any) -> str:
    return json.dumps(experiment.model_dump(mode="json", exclude=PER_REQUEST_SETTINGS), sort_keys=True)
