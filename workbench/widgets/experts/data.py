"""Tables of which experts a run used: rows computed by each expert of each layer, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from workbench.errors import WorkbenchError
from workbench.trace.events import Event, ExpertsUsed


@dataclass(frozen=True)
class ExpertTable:
    """`counts` [step, layer, expert] are the rows that each expert computed; of a layer with fewer experts than another
    the missing ones are -1. `steps` and `layers` are the numbers of the first two axes."""

    steps: tuple[int, ...]
    layers: tuple[int, ...]
    counts: np.ndarray

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> ExpertTable:
        """Read the events of a run. Raises WorkbenchError where none says which experts were used."""
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
        """Return rows by [layer, expert], of one step by its number or of all; -1 where there is no such expert."""
        if step is None:
            return np.where(self.counts[0] < 0, -1, self.counts.sum(axis=0))
        if step not in self.steps:
            raise WorkbenchError(f"no step {step}; there are {self.steps[0]} to {self.steps[-1]}")
        return self.counts[self.steps.index(step)]


@dataclass(frozen=True)
class LayerUse:
    """Describe the use of one layer's experts: `busiest` is the largest share of its rows, `even` what each would
    have, `unused` the number of experts without a row."""

    layer: int
    busiest: float
    even: float
    unused: int


def layer_use(layer: int, rows: np.ndarray) -> LayerUse:
    """Summarize the rows [expert] of one layer."""
    there = rows[rows >= 0]
    return LayerUse(layer, float(there.max() / max(there.sum(), 1)), 1 / len(there), int((there == 0).sum()))
