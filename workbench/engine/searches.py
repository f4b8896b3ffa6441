"""Track the beam searches of a runner, and the result of each beam."""

from __future__ import annotations

from typing import NamedTuple

from workbench.engine.beam_search import BeamHypothesis, BeamSearch
from workbench.engine.best_of import not_chosen_message
from workbench.engine.output import StopChecker
from workbench.engine.plan import StepPlan
from workbench.request import SamplingParameters, Sequence


class BeamResult(NamedTuple):
    """The result of one beam: its text, and why that is not returned (empty if it is)."""

    sequence: Sequence
    hypothesis: BeamHypothesis | None
    not_chosen_reason: str = ""


class BeamSearches:
    """Beam searches by sequence; every beam is a sequence of its own to the scheduler."""

    def __init__(self) -> None:
        self._by_request_id: dict[str, BeamSearch] = {}  # by each of their beams

    def add(self, sampling: SamplingParameters, beams: list[Sequence], stop_checker: StopChecker) -> None:
        """Start a search with `beams`; its texts end where `stop_checker` would."""
        search = BeamSearch(sampling, beams, stop_checker.end_token_ids, stop_checker.max_output_tokens)
        self._by_request_id |= {beam.request_id: search for beam in beams}

    def search_of(self, sequence: Sequence) -> BeamSearch | None:
        return self._by_request_id.get(sequence.request_id)

    def beams_of(self, sequence: Sequence) -> list[Sequence]:
        """Return the beams of the search of `sequence`; the sequence itself without one."""
        search = self.search_of(sequence)
        return [sequence] if search is None else search.sequences

    def remove(self, request_id: str) -> None:
        self._by_request_id.pop(request_id, None)

    def ready(self, plan: StepPlan) -> list[BeamSearch]:
        """Return searches whose beams all have logits after `plan`."""
        if not self._by_request_id:
            return []
        met = {id(search): search for span in plan.spans if (search := self.search_of(span.sequence)) is not None}
        return [search for search in met.values() if search.ready]


def beam_results(search: BeamSearch) -> list[BeamResult]:
    """Return the result of each beam of a finished search, best text first."""
    return [_beam_result(search, rank, mate) for rank, mate in enumerate(search.sequences)]


def _beam_result(search: BeamSearch, rank: int, mate: Sequence) -> BeamResult:
    found, returned = search.hypotheses, search.num_returned
    if rank >= len(found):
        return BeamResult(mate, None, f"not chosen: the search found {len(found)} texts")
    if rank < returned:
        return BeamResult(mate, found[rank])
    return BeamResult(mate, found[rank], not_chosen_message(rank, len(search.sequences), found[rank].score, found[returned - 1].score))
