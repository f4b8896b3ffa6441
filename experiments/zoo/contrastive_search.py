"""Contrastive search: of the likeliest tokens take one whose state is unlike those before it, to repeat nothing.

Su et al., 2022, "A Contrastive Framework for Neural Text Generation", equation 5, with V the k likeliest tokens, h(v)
the last layer's state of a token and s the cosine of two of them:

    x(t)  =  argmax over v in V of  (1 - alpha) * p(v | x)  -  alpha * max over j < t of s(h(v), h(x(j)))

Here j runs over the prompt's last token and the output, as the cached pages of a prompt hold no states. Each of the k
candidates is a branch that shares the text's pages, so that a step gives h of all and p of what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench import WorkbenchError
from workbench.parts import Branch


@dataclass(frozen=True)
class ContrastiveSearch:
    """A search; its beams are the k candidates."""

    alpha: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise WorkbenchError(f"alpha must be from 0 to 1, not {self.alpha}")

    def advance(self, branches: Sequence[Branch]) -> tuple[int, list[tuple[int, int]]]:
        scores = [self.score(branch) for branch in branches]
        best = scores.index(max(scores))
        candidates = branches[best].logits.sort(descending=True, stable=True).indices[: len(branches)].tolist()
        return best, [(best, candidates[number % len(candidates)]) for number in range(len(branches))]

    def score(self, branch: Branch) -> float:
        """Return the score of the branch's last token."""
        if not branch.token_ids:
            return 0.0
        states = torch.nn.functional.normalize(branch.states.double(), dim=-1)  # [1 + token, hidden]
        nearest = float((states[:-1] @ states[-1]).max())
        return (1 - self.alpha) * float(torch.tensor(branch.logprobs[-1]).exp()) - self.alpha * nearest
