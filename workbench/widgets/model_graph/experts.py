"""Count the rows that each expert of each layer computed in a run, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from workbench.errors import WorkbenchError
from workbench.trace.events import Event, ExpertsUsed


@dataclass(frozen=True)
class ExpertTable:
    """The number of rows that each expert computed: `counts` [step, layer, expert], -1 where a layer has fewer experts.

    `steps` and `layers` hold the numbers of steps and layers along the first two axes."""

    steps: tuple[int, ...]
    layers: tuple[int, ...]
    counts: np.ndarray

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> ExpertTable:
        """Build the table from the events of a run.

        Raises:
            WorkbenchError: no event records experts, or the events belong to models with different layers.
        """
        used = [event for event in events if isinstance(event, ExpertsUsed) and event.layers]
        if not used:
            raise WorkbenchError("no event says which experts were used: call runner.record_experts() before the run")
        layers = tuple(layer for layer, _ in used[0].layers)
        experts = max(len(rows) for _, rows in used[0].layers)
        counts = np.full((len(used), len(layers), experts), -1, dtype=np.int64)
        for step, event in enumerate(used):
            if tuple(layer for layer, _ in event.layers) != layers:
                raise WorkbenchError(f"step {event.step} has other layers than those before: events of two models?")
            for layer, (_, rows) in enumerate(event.layers):
                counts[step, layer, : len(rows)] = rows
        return cls(tuple(event.step for event in used), layers, counts)

    def rows(self, step: int | None = None) -> np.ndarray:
        """Return counts [layer, expert] of one step by its number, or of all steps; -1 for missing experts."""
        if step is None:
            return np.where(self.counts[0] < 0, -1, self.counts.sum(axis=0))
        if step not in self.steps:
            raise WorkbenchError(f"no step {step}; there are {self.steps[0]} to {self.steps[-1]}")
        return self.counts[self.steps.index(step)]


@dataclass(frozen=True)
class LayerUse:
    """The use of one layer's experts: `busiest` is the largest fraction of the layer's rows that went to one expert,
    `even` the fraction for each expert under an even load, `unused` the number of experts without rows."""

    layer: int
    busiest: float
    even: float
    unused: int


def layer_use(layer: int, rows: np.ndarray) -> LayerUse:
    """Return the use of one layer's experts from their numbers of rows [expert]."""
    there = rows[rows >= 0]
    return LayerUse(layer, float(there.max() / max(there.sum(), 1)), 1 / len(there), int((there == 0).sum()))
