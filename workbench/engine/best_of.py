"""Best of n: the samples of a request that are worth showing are known when the last of them has ended."""

from __future__ import annotations

from dataclasses import replace

from workbench.request import FinishReason
from workbench.trace.events import Decoded, Event, Finished

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


class BestOf:
    """Keeps what happens to `samples` samples until all have ended. Then the events come with the times at which they
    happened, and with new numbers: samples 0 to `chosen` - 1 are those whose tokens the model gives the highest
    probability, the best first; of the others, Finished says that they were not chosen, and why."""

    def __init__(self, samples: int, chosen: int):
        self.samples, self.chosen = samples, chosen
        self._events: list[Event] = []
        self._scores = [0.0] * samples
        self._ends: dict[int, Finished] = {}

    def add(self, event: Event) -> list[Event]:
        """What may be told now: nothing, or all of it after the last end."""
        self._events.append(event)
        if isinstance(event, Decoded):
            self._scores[event.sample] += event.logprob or 0.0
        elif isinstance(event, Finished):
            self._ends[event.sample] = event
        return self._told() if len(self._ends) == self.samples else []

    def _told(self) -> list[Event]:
        broken = {number: end.reason not in COMPLETED for number, end in self._ends.items()}
        ranking = sorted(self._ends, key=lambda number: (broken[number], -self._scores[number], number))
        place = {number: rank for rank, number in enumerate(ranking)}
        last = self._scores[ranking[self.chosen - 1]]
        told: list[Event] = []
        for event in self._events:
            if isinstance(event, Finished) and not broken[event.sample]:
                event = replace(event, score=(score := self._scores[event.sample]))
                if place[event.sample] >= self.chosen:
                    words = not_chosen(place[event.sample], self.samples, score, last)
                    event = replace(event, reason=str(FinishReason.NOT_CHOSEN), error=words)
            told.append(replace(event, sample=place[event.sample]))
        return told


def not_chosen(rank: int, samples: int, score: float, last: float) -> str:
    return f"not chosen: number {rank + 1} of {samples}, with a score of {score:.3f}; the last chosen has {last:.3f}"
