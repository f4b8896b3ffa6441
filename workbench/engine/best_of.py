"""Choose the best n samples of a request, known when the last of them has finished."""

from __future__ import annotations

from dataclasses import replace

from workbench.request import FinishReason
from workbench.trace.events import Decoded, Event, Finished

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


class BestOf:
    """The events of `samples` samples, kept until all have finished.

    They are then emitted with their original times and new numbers: samples 0 to `num_returned` - 1 have the highest
    log-probability, best first. Finished says of the others that they were not chosen, and why.
    """

    def __init__(self, samples: int, num_returned: int):
        self.samples, self.num_returned = samples, num_returned
        self._events: list[Event] = []
        self._scores = [0.0] * samples
        self._ends: dict[int, Finished] = {}

    def add(self, event: Event) -> list[Event]:
        """Add an event; return the events to emit now: none, or all after the last end."""
        self._events.append(event)
        if isinstance(event, Decoded):
            self._scores[event.sample] += event.logprob or 0.0
        elif isinstance(event, Finished):
            self._ends[event.sample] = event
        return self._ranked_events() if len(self._ends) == self.samples else []

    def _ranked_events(self) -> list[Event]:
        broken = {number: end.reason not in COMPLETED for number, end in self._ends.items()}
        ranking = sorted(self._ends, key=lambda number: (broken[number], -self._scores[number], number))
        place = {number: rank for rank, number in enumerate(ranking)}
        last = self._scores[ranking[self.num_returned - 1]]
        ranked: list[Event] = []
        for event in self._events:
            if isinstance(event, Finished) and not broken[event.sample]:
                event = replace(event, score=(score := self._scores[event.sample]))
                if place[event.sample] >= self.num_returned:
                    words = not_chosen_message(place[event.sample], self.samples, score, last)
                    event = replace(event, reason=str(FinishReason.NOT_CHOSEN), error=words)
            ranked.append(replace(event, sample=place[event.sample]))
        return ranked


def not_chosen_message(rank: int, samples: int, score: float, last: float) -> str:
    return f"not chosen: number {rank + 1} of {samples}, with a score of {score:.3f}; the last chosen has {last:.3f}"
