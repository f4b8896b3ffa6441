"""Run a user-defined search over branches: several texts advance together, and the search chooses how they continue.

    branches   | prompt | a b c |      a step computes all of them; the search names the best text so far,
               |        | a b d |      and for each branch which one it continues, with which token
               |        | a b e |

It sees the model's logits after each branch and the hidden states of its tokens after the last layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from workbench.custom import load_verbs
from workbench.decoding.beams import Beam, BeamHypothesis, Beams, bad_logits
from workbench.decoding.method import Advance, Fork, NextRow
from workbench.display import truncate_text
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, SamplingParameters, Sequence


@dataclass(frozen=True, eq=False)
class Branch:
    """One text of a search: its output tokens with the model's log-probability of each, the hidden states after the
    last layer, [1 + token, hidden], of the prompt's last token and of the output, and the logits [vocab] of the next
    token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    states: Tensor
    logits: Tensor
    is_ended: bool = False  # its last token ends the text: continuations are not part of an answer


class Search(Protocol):
    """The interface of a user-defined search. `advance` returns the index of the best branch, and a (branch, next
    token) pair for each branch to continue.

    The search ends with the best branch when that has reached its token limit, or an end token. At first all branches
    consist of the prompt only.
    """

    def advance(self, branches: Many[Branch], /) -> tuple[int, Many[tuple[int, int]]]: ...


def load_search(part: CustomPart) -> Search:
    """Build the search that `part` names; WorkbenchError if it is not a search."""
    return load_verbs(part, "search", {"advance": "(branches)"})


def advance_search(search: Search, branches: Many[Branch], name: str) -> tuple[int, list[tuple[int, int]]]:
    """Advance `search`; WorkbenchError, naming it, if it fails or returns an unknown branch or token."""
    try:
        returned = search.advance(branches)
    except Exception as error:
        raise WorkbenchError(f"search {name}: raised {type(error).__name__}: {error}") from error
    count, vocab = len(branches), len(branches[0].logits)
    try:
        best, going = returned
        number, pairs = int(best), [(int(branch), int(token)) for branch, token in going]
    except (TypeError, ValueError):
        number, pairs = -1, []
    is_valid = all(0 <= branch < count and 0 <= token < vocab for branch, token in pairs)
    if not (is_valid and 0 <= number < count == len(pairs)):
        right = f"the best branch, 0 to {count - 1}, and {count} pairs (branch, token), tokens 0 to {vocab - 1}"
        raise WorkbenchError(f"search {name}: advance must return {right}; not {truncate_text(repr(returned), 80)}")
    return number, pairs


class CustomSearch(Beams):
    """Beams whose continuations a user-defined search chooses. The only text is emitted at the end, as with beam
    search.
    """

    def __init__(
        self, search: Search, num_layers: int, sampling: SamplingParameters, sequences: Iterable[Sequence],
        end_token_ids: set[int], max_tokens: int,
    ):  # fmt: skip
        super().__init__(sampling, sequences, end_token_ids, max_tokens)
        assert sampling.search is not None
        self.layers = (num_layers,)
        self._search, self._name = search, sampling.search.path
        self._before: dict[str, Branch] = {}  # branch of each sequence, by id, before its last token
        self._branches: dict[str, Branch] = {}  # branch of each sequence with its last token

    @property
    def is_ready(self) -> bool:
        return len(self._branches) == self.num_beams and not any(beam.sequence.num_new_tokens for beam in self.beams)

    def add(self, sequence: Sequence, row: NextRow) -> str:
        if wrong := bad_logits(row.logits):
            return wrong
        state = row.states.get(self.layers[0])
        if state is None:
            return f"search {self._name}: needs states after the last layer, which the step's program does not return"
        before = self._before.get(sequence.request_id, Branch((), (), state[None][:0], row.logits))
        states = torch.cat([before.states, state[None]])
        self._branches[sequence.request_id] = replace(before, states=states, logits=row.logits.clone())
        return ""

    def advance(self, step: int, now: float, fork: Fork) -> list[Advance]:
        """Continue the branches as the search chooses, or end with the text of its best branch."""
        self.token_times.append((now, step))
        branches = [self._branches[beam.sequence.request_id] for beam in self.beams]
        self._branches = {}
        best, going = advance_search(self._search, branches, self._name)
        text = branches[best]
        if text.token_ids and (len(text.token_ids) >= self.max_tokens or text.token_ids[-1] in self.end_token_ids):
            self.hypotheses = [BeamHypothesis(text.token_ids, text.logprobs, sum(text.logprobs))]
            return self._results()
        sequences = fork(self.sequences, [(self.beams[number].sequence, token) for number, token in going])
        self.beams = [Beam(sequence, 0.0) for sequence in sequences]
        longer = [_longer(branches[number], token, token in self.end_token_ids) for number, token in going]
        self._before = {sequence.request_id: branch for sequence, branch in zip(sequences, longer, strict=True)}
        return []


def _longer(branch: Branch, token: int, is_ended: bool) -> Branch:
    """Return the branch with one more token; its state and logits are added by the next step."""
    logprob = float(branch.logits.double().log_softmax(-1)[token])
    ids, logprobs = (*branch.token_ids, token), (*branch.logprobs, logprob)
    return Branch(ids, logprobs, branch.states, branch.logits, branch.is_ended or is_ended)
