"""The beam searches that a runner serves: whose beam a sequence is, and what each beam stands for in the end."""

from __future__ import annotations

from typing import NamedTuple

from workbench.engine.beam_search import Hypothesis, Search
from workbench.engine.best_of import not_chosen
from workbench.engine.output import Output
from workbench.engine.plan import StepPlan
from workbench.request import SamplingParameters, Sequence


class Place(NamedTuple):
    """Where `mate` stands when its search is over: the text it tells, and why that is not returned, or no words."""

    mate: Sequence
    found: Hypothesis | None
    words: str = ""


class Searches:
    """Every beam is a sequence of its own to the scheduler; `of` says which search it belongs to."""

    def __init__(self) -> None:
        self._of: dict[str, Search] = {}  # by each of their beams

    def begin(self, asked: SamplingParameters, beams: list[Sequence], output: Output) -> None:
        """`beams` are one search; its texts end where `output` would."""
        search = Search(asked, beams, output.ends, output.most)
        self._of |= {beam.request_id: search for beam in beams}

    def of(self, sequence: Sequence) -> Search | None:
        return self._of.get(sequence.request_id)

    def mates(self, sequence: Sequence) -> list[Sequence]:
        """Those that what happens to `sequence` happens to."""
        search = self.of(sequence)
        return [sequence] if search is None else search.mates

    def forget(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    def ready(self, plan: StepPlan) -> list[Search]:
        """Searches all of whose beams have their logits, now that `plan` was computed."""
        if not self._of:
            return []
        met = {id(search): search for span in plan.spans if (search := self.of(span.sequence)) is not None}
        return [search for search in met.values() if search.ready]


def places(search: Search) -> list[Place]:
    """What each beam of a search that is over stands for, the best text first."""
    return [_place(search, rank, mate) for rank, mate in enumerate(search.mates)]


def _place(search: Search, rank: int, mate: Sequence) -> Place:
    found, returned = search.found, search.returned
    if rank >= len(found):
        return Place(mate, None, f"not chosen: the search found {len(found)} texts")
    if rank < returned:
        return Place(mate, found[rank])
    return Place(mate, found[rank], not_chosen(rank, len(search.mates), found[rank].score, found[returned - 1].score))
