"""Runners that were made for experiments, of which the last few are kept."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

KEPT = 3
# What may differ between experiments that one runner serves.
ASIDE = {"question", "sampling", "workload", "measure", "variants", "sweep", "judge"}


class KeptRunners:
    """`of` gives the runner of an experiment: one that is there, or a new one, for which the oldest may have to go."""

    def __init__(self, most: int = KEPT):
        self._most, self._kept = most, OrderedDict[str, Any]()

    def has(self, experiment: Any) -> bool:
        return _key(experiment) in self._kept

    def put(self, experiment: Any, runner: Any) -> None:
        """`runner` is what the experiment describes."""
        self._kept[_key(experiment)] = runner
        self._kept.move_to_end(_key(experiment))
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def of(self, experiment: Any, tell: Callable[[str], None]) -> Any:
        """WorkbenchError for what cannot be loaded; `tell` hears of what takes long."""
        from workbench.study.run import runner_for

        found = self._kept.get(_key(experiment))
        if found is None:
            while len(self._kept) >= self._most:  # before the new one takes memory
                self._kept.popitem(last=False)
            found = runner_for(experiment, tell)
        self.put(experiment, found)
        return found


def _key(experiment: Any) -> str:
    return json.dumps(experiment.model_dump(mode="json", exclude=ASIDE), sort_keys=True)
