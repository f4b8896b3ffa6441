"""Cache the last few runners that were loaded for experiments."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

KEPT = 3
# What may differ between experiments that one runner serves.
ASIDE = {"question", "sampling", "workload", "measure", "variants", "sweep", "judge"}


class KeptRunners:
    """`of` gives the runner of an experiment: one that is there, or a new one, for which the oldest may have to go. One
    is made at a time: who asks meanwhile waits, and may find there what was made."""

    def __init__(self, most: int = KEPT):
        self._most, self._kept = most, OrderedDict[str, Any]()
        self._making = threading.Lock()

    def put(self, experiment: Any, runner: Any) -> None:
        """`runner` is what the experiment describes."""
        self._kept[_key(experiment)] = runner
        self._kept.move_to_end(_key(experiment))
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def of(self, experiment: Any, tell: Callable[[str], None]) -> Any:
        """WorkbenchError for what cannot be loaded; `tell` hears of what takes long, and
        ends it by an error of its own."""
        from workbench.study.run import runner_for

        if self._making.locked():
            tell("waiting until the runner is made that was begun before")
        with self._making:
            found = self._kept.get(_key(experiment))
            if found is None:
                tell("making the runner")
                while len(self._kept) >= self._most:  # before the new one takes memory
                    self._kept.popitem(last=False)
                found = runner_for(experiment, tell)
            self.put(experiment, found)
            return found


def _key(experiment: Any) -> str:
    return json.dumps(experiment.model_dump(mode="json", exclude=ASIDE), sort_keys=True)
