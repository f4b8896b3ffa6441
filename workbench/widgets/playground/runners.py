"""Cache a widget's most recent runners by experiment."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from workbench.errors import WorkbenchError

MAX_RUNNERS = 3
# Settings in which experiments may differ that share a runner.
PER_REQUEST_SETTINGS = {"question", "sampling", "workload", "measure", "variants", "sweep", "judge"}


class RunnerCache:
    """A cache of runners by experiment: `get` returns a cached runner or loads one, and drops the oldest if the cache
    is full.

    Runners are loaded one at a time; other threads wait, and may then find the runner in the cache. After `close` the
    cache keeps none.
    """

    def __init__(self, max_runners: int = MAX_RUNNERS):
        self._max_runners, self._runners = max_runners, OrderedDict[str, Any]()
        self._made, self._used = set[str](), set[str]()  # keys: loaded here; have run a request
        self._load_lock = threading.Lock()  # held while a runner is loaded, which may take minutes
        self._lock, self._closed = threading.Lock(), False  # guards the runners, never held for long

    def put(self, experiment: Any, runner: Any) -> None:
        """Add the runner of an experiment. Raises WorkbenchError once the cache is closed."""
        with self._lock:
            self._check_open()
            self._runners[_key(experiment)] = runner
            self._runners.move_to_end(_key(experiment))
            self._drop_oldest(self._max_runners)

    def close(self) -> None:
        """Drop all runners, accept no more, and close those that were loaded here."""
        with self._lock:
            self._closed = True
            runners, self._runners = self._runners, OrderedDict[str, Any]()
        for key, runner in runners.items():
            if key in self._made:
                runner.close()

    def is_new(self, experiment: Any) -> bool:
        """Return whether the runner of `experiment` still needs a warm-up."""
        return _key(experiment) not in self._used

    def mark_used(self, experiment: Any) -> None:
        self._used.add(_key(experiment))

    def get(self, experiment: Any, report: Callable[[str], None]) -> Any:
        """Return the runner of `experiment`, loaded if necessary.

        `report` is called with a status before each long piece of work; an exception that it raises ends the loading.
        Raises WorkbenchError if the runner cannot be loaded, or the cache is closed."""
        from workbench.experiment.build import runner_for

        key = _key(experiment)
        if self._load_lock.locked():
            report("waiting for another runner to load")
        with self._load_lock:
            with self._lock:
                self._check_open()
                found = self._runners.get(key)
            if found is None:
                report("loading the runner")
                shared = self._loaded_model(experiment)
                with self._lock:
                    self._drop_oldest(self._max_runners - 1)  # before the new one takes memory
                found = runner_for(experiment, report, **({} if shared is None else {"model": shared}))
                self._made.add(key)
                self._used.discard(key)
            try:
                self.put(experiment, found)
            except WorkbenchError:  # closed while the runner was loaded
                if key in self._made:
                    found.close()
                raise
            return found

    def _check_open(self) -> None:
        if self._closed:
            raise WorkbenchError("the view is closed and keeps no runner; make a new view")

    def _drop_oldest(self, max_runners: int) -> None:
        while len(self._runners) > max_runners:
            self._runners.popitem(last=False)

    def _loaded_model(self, experiment: Any) -> Any:
        """Return a loaded model with the weights of `experiment`, or None."""
        with self._lock:
            runners = tuple(self._runners.values())
        each = (runner.loaded_model.for_settings(runner.config, experiment) for runner in runners)
        return next((loaded for loaded in each if loaded is not None), None)


def _key(experiment: Any) -> str:
    return json.dumps(experiment.model_dump(mode="json", exclude=PER_REQUEST_SETTINGS), sort_keys=True)
