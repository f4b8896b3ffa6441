"""The last few runners of a widget, by the experiments they carry out."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from workbench.errors import WorkbenchError

MAX_RUNNERS = 3
# What may differ between experiments that one runner serves.
PER_REQUEST_SETTINGS = {"question", "sampling", "workload", "measure", "variants", "sweep", "judge"}


class RunnerCache:
    """Runners of experiments: `get` returns one that is there, or makes one, for which the oldest may have to go.

    One is made at a time: another thread waits meanwhile, and may find there what was made. After `close` none is kept.
    """

    def __init__(self, max_runners: int = MAX_RUNNERS):
        self._max_runners, self._runners = max_runners, OrderedDict[str, Any]()
        self._made, self._used = set[str](), set[str]()  # those that were made here, and that have run a request
        self._load_lock = threading.Lock()  # held while a runner is made, which may take minutes
        self._lock, self._closed = threading.Lock(), False  # of the runners, never held for long

    def put(self, experiment: Any, runner: Any) -> None:
        """Keep the runner that the experiment describes. Raises WorkbenchError once the cache is closed."""
        with self._lock:
            self._check_open()
            self._runners[_key(experiment)] = runner
            self._runners.move_to_end(_key(experiment))
            self._drop_oldest(self._max_runners)

    def close(self) -> None:
        """Forget all runners and keep no more; the processes of those that were made here end."""
        with self._lock:
            self._closed = True
            runners, self._runners = self._runners, OrderedDict[str, Any]()
        for key, runner in runners.items():
            if key in self._made:
                runner.close()

    def is_new(self, experiment: Any) -> bool:
        """Return whether the runner of `experiment` has run nothing that was timed."""
        return _key(experiment) not in self._used

    def mark_used(self, experiment: Any) -> None:
        self._used.add(_key(experiment))

    def get(self, experiment: Any, report: Callable[[str], None]) -> Any:
        """Return the runner of `experiment`; raise WorkbenchError where it cannot be loaded, or the cache is closed.
        `report` gets a line on what takes long, and ends it by an error of its own."""
        from workbench.experiment.build import runner_for

        key = _key(experiment)
        if self._load_lock.locked():
            report("waiting until the runner is made that was begun before")
        with self._load_lock:
            with self._lock:
                self._check_open()
                found = self._runners.get(key)
            if found is None:
                report("making the runner")
                shared = self._loaded_model(experiment)
                with self._lock:
                    self._drop_oldest(self._max_runners - 1)  # before the new one takes memory
                found = runner_for(experiment, report, **({} if shared is None else {"model": shared}))
                self._made.add(key)
                self._used.discard(key)
            try:
                self.put(experiment, found)
            except WorkbenchError:  # closed while it was made
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
        """Return a model in memory with the weights of `experiment`; None where there is none."""
        with self._lock:
            runners = tuple(self._runners.values())
        each = (runner.loaded_model.for_settings(runner.config, experiment) for runner in runners)
        return next((loaded for loaded in each if loaded is not None), None)


def _key(experiment: Any) -> str:
    return json.dumps(experiment.model_dump(mode="json", exclude=PER_REQUEST_SETTINGS), sort_keys=True)
