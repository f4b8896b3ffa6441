"""Choose the best of n plain samples once all have finished: by log-probability, or by a user-defined ranking."""

from __future__ import annotations

from dataclasses import replace

from workbench.decoding.beams import not_chosen_message
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, FinishReason
from workbench.sampling.ranking import Ranking, load_ranking, rank_samples
from workbench.trace.events import Decoded, Event, Finished

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


class BestOf:
    """A buffer that holds back the events of a request's samples until all samples have finished.

    Then the events are emitted with their original times and new sample numbers: samples 0 to `num_returned` - 1 have
    the highest log-probability, or the highest score of the ranking, best first. The Finished events of the other
    samples give the reason why they were not chosen.
    """

    def __init__(self, samples: int, num_returned: int):
        self.samples, self.num_returned = samples, num_returned
        self._ranking: tuple[str, Ranking] | None = None  # user-defined, with its path
        self._events: list[Event] = []
        self._scores = [0.0] * samples
        self._ends: dict[int, Finished] = {}

    def rank_by(self, part: CustomPart) -> None:
        """Choose the samples by the scores of the ranking `part`; raises WorkbenchError if it is not a ranking."""
        self._ranking = part.path, load_ranking(part)

    def add(self, event: Event) -> list[Event]:
        """Add an event, and return the events to emit now: all held-back events if the last sample has ended, otherwise
        none.
        """
        self._events.append(event)
        if isinstance(event, Decoded):
            self._scores[event.sample] += event.logprob or 0.0
        elif isinstance(event, Finished):
            self._ends[event.sample] = event
        return self._ranked_events() if len(self._ends) == self.samples else []

    def _rank(self) -> None:
        """Replace log-probabilities by the ranking's scores; if it fails, every sample ends with its error."""
        complete = [number for number in sorted(self._ends) if self._ends[number].reason in COMPLETED]
        if self._ranking is None or not complete:
            return
        name, ranking = self._ranking
        samples = [replace(self._ends[number], score=self._scores[number]) for number in complete]
        try:
            for number, score in zip(complete, rank_samples(ranking, samples, name), strict=True):
                self._scores[number] = score
        except WorkbenchError as error:
            for number in complete:
                self._ends[number] = replace(self._ends[number], reason=str(FinishReason.ERROR), error=str(error))

    def _ranked_events(self) -> list[Event]:
        self._rank()
        broken = {number: end.reason not in COMPLETED for number, end in self._ends.items()}
        ranking = sorted(self._ends, key=lambda number: (broken[number], -self._scores[number], number))
        place = {number: rank for rank, number in enumerate(ranking)}
        last = self._scores[ranking[self.num_returned - 1]]
        ranked: list[Event] = []
        for event in self._events:
            if isinstance(event, Finished):
                event = self._ends[event.sample]
            if isinstance(event, Finished) and not broken[event.sample]:
                event = replace(event, score=(score := self._scores[event.sample]))
                if place[event.sample] >= self.num_returned:
                    words = not_chosen_message(place[event.sample], self.samples, score, last)
                    event = replace(event, reason=str(FinishReason.NOT_CHOSEN), error=words)
            ranked.append(replace(event, sample=place[event.sample]))
        return ranked
