"""Carry out a search of the user's own (see sampling/searches.py) as beams: sequences that share pages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.engine.beam_search import BeamHypothesis, BeamSearch
from workbench.request import SamplingParameters, Sequence
from workbench.sampling.samplers import describe_bad_logits
from workbench.sampling.searches import Branch, Search, advance_search


class BranchSearch(BeamSearch):
    """A search whose continuations a part of the user's own chooses. Its one text comes at the end, as those of beams
    do."""

    def __init__(
        self, search: Search, sampling: SamplingParameters, sequences: Iterable[Sequence], end_token_ids: set[int],
        max_tokens: int,
    ):  # fmt: skip
        super().__init__(sampling, sequences, end_token_ids, max_tokens)
        assert sampling.search is not None
        self._search, self._name = search, sampling.search.path
        self._before: dict[str, Branch] = {}  # by sequence: its text, without what its last token gives
        self._branches: dict[str, Branch] = {}  # with it
        self._next: list[Branch] = []

    def add_logits(self, sequence: Sequence, logits: Tensor, state: Tensor | None = None) -> str:
        largest = float(logits.max())
        if not abs(largest) < torch.inf:
            return f"the model's logits {describe_bad_logits(largest)}"
        if state is None:
            return f"search {self._name}: needs the states after the last layer, which this executor does not give"
        name, states = sequence.request_id, state[None].clone()
        before = self._before.get(name, Branch((), (), states[:0], logits))
        states = torch.cat([before.states, states])
        self._branches[name] = Branch(before.token_ids, before.logprobs, states, logits.clone())
        self._rows[name] = []  # it has its row
        return ""

    def advance(self, now: float, step: int) -> list[tuple[Sequence, int]] | None:
        """Return (sequence, token) for each branch; None when the search is over.

        Raises:
            WorkbenchError: the part fails.
        """
        self.token_times.append((now, step))
        branches = [self._branches[beam.sequence.request_id] for beam in self.beams]
        self._branches, self._rows = {}, {}
        best, going = advance_search(self._search, branches, self._name)
        text = branches[best]
        if text.token_ids and (len(text.token_ids) >= self.max_tokens or text.token_ids[-1] in self.end_token_ids):
            self.hypotheses = [BeamHypothesis(text.token_ids, text.logprobs, sum(text.logprobs))]
            return None
        self._next = [_longer(branches[number], token) for number, token in going]
        self.beams = [self.beams[number] for number, _ in going]
        return [(beam.sequence, token) for beam, (_, token) in zip(self.beams, going, strict=True)]

    def reassign(self, sequences: list[Sequence]) -> None:
        super().reassign(sequences)
        self._before = {each.request_id: branch for each, branch in zip(sequences, self._next, strict=True)}


def _longer(branch: Branch, token: int) -> Branch:
    logprob = float(branch.logits.double().log_softmax(-1)[token])
    return Branch((*branch.token_ids, token), (*branch.logprobs, logprob), branch.states, branch.logits)
