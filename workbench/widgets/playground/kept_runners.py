"""Cache the last few runners that were loaded for experiments."""

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
    """`of` gives the runner of an experiment: one that is there, or a new one, for which the oldest may have to go. One
    is made at a time: who asks meanwhile waits, and may find there what was made."""

    def __init__(self, max_runners: int = MAX_RUNNERS):
        self._max_runners, self._runners = max_runners, OrderedDict[str, Any]()
        self._load_lock = threading.Lock()

    def put(self, experiment: Any, runner: Any) -> None:
        """`runner` is what the experiment describes."""
        self._runners[_key(experiment)] = runner
        self._runners.move_to_end(_key(experiment))
        while len(self._runners) > self._max_runners:
            self._runners.popitem(last=False)

    def get(self, experiment: Any, report: Callable[[str], None]) -> Any:
        """WorkbenchError for what cannot be loaded; `tell` hears of what takes long, and
        ends it by an error of its own."""
        from workbench.study.run import runner_for

        if self._load_lock.locked():
            report("waiting until the runner is made that was begun before")
        with self._load_lock:
            found = self._runners.get(_key(experiment))
            if found is None:
                report("making the runner")
                while len(self._runners) >= self._max_runners:  # before the new one takes memory
                    self._runners.popitem(last=False)
                found = runner_for(experiment, report)
            self.put(experiment, found)
            return found


def _key(experiment: Any) -> str:
    return json.dumps(experiment.model_dump(mode="json", exclude=PER_REQUEST_SETTINGS), sort_keys=True)
