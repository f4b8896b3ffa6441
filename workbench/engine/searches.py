"""Track the beam searches of a runner, and the result of each beam."""

from __future__ import annotations

from typing import NamedTuple

from workbench.engine.beam_search import Hypothesis, Search
from workbench.engine.best_of import not_chosen
from workbench.engine.output import Output
from workbench.engine.plan import StepPlan
from workbench.request import SamplingParameters, Sequence


class Place(NamedTuple):
    """The result of one beam: its text, and why that is not returned (empty if it is)."""

    mate: Sequence
    found: Hypothesis | None
    words: str = ""


class Searches:
    """Beam searches by sequence; every beam is a sequence of its own to the scheduler."""

    def __init__(self) -> None:
        self._of: dict[str, Search] = {}  # by each of their beams

    def begin(self, asked: SamplingParameters, beams: list[Sequence], output: Output) -> None:
        """Start a search with `beams`; its texts end where `stop_checker` would."""
        search = Search(asked, beams, output.ends, output.most)
        self._of |= {beam.request_id: search for beam in beams}

    def of(self, sequence: Sequence) -> Search | None:
        return self._of.get(sequence.request_id)

    def mates(self, sequence: Sequence) -> list[Sequence]:
        """Return the beams of the search of `sequence`; the sequence itself without one."""
        search = self.of(sequence)
        return [sequence] if search is None else search.mates

    def forget(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    def ready(self, plan: StepPlan) -> list[Search]:
        """Return searches whose beams all have logits after `plan`."""
        if not self._of:
            return []
        met = {id(search): search for span in plan.spans if (search := self.of(span.sequence)) is not None}
        return [search for search in met.values() if search.ready]


def places(search: Search) -> list[Place]:
    """Return the result of each beam of a finished search, best text first."""
    return [_place(search, rank, mate) for rank, mate in enumerate(search.mates)]


def _place(search: Search, rank: int, mate: Sequence) -> Place:
    found, returned = search.found, search.returned
    if rank >= len(found):
        return Place(mate, None, f"not chosen: the search found {len(found)} texts")
    if rank < returned:
        return Place(mate, found[rank])
    return Place(mate, found[rank], not_chosen(rank, len(search.mates), found[rank].score, found[returned - 1].score))
