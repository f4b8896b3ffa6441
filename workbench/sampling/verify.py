"""Which drafted tokens stand: speculative sampling (Leviathan et al., 2023; Chen et al., 2023).

A token x that was drafted from q stands with probability min(1, p(x) / q(x)), where p is what the sampler would draw
from there: filtered, given the tokens before it. The first that falls is replaced by a draw from max(0, p - q); where
all stand, one more token is drawn from the target. So every token has the distribution it has without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

ACCEPT, DRAFT = b"accept", b"draft"  # what a random number is for, beside the draw itself


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for a sequence's next positions. `probabilities` [drafted, vocab] are those that each was drawn
    from, given the ones before it; None where each was certain."""

    token_ids: tuple[int, ...] = ()
    probabilities: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> Draft:
        """The first `count` tokens of it."""
        if count >= len(self):
            return self
        return Draft(self.token_ids[:count], None if self.probabilities is None else self.probabilities[:count])


NO_DRAFT = Draft()


def judge(draft: Draft, target: Callable[[int], Tensor], uniforms: Sequence[float]) -> tuple[int, Tensor]:
    """How many of the drafted tokens stand, and the weights [vocab] that the token after them is drawn by.

    `target(i)` are the probabilities [vocab], float64, at the i-th drafted position, and after the last of them; asked
    for in order, and no further than needed. `uniforms` are numbers in [0, 1), one a drafted token.
    """
    for place, token in enumerate(draft.token_ids):
        p = target(place)
        q = None if draft.probabilities is None else draft.probabilities[place]
        drawn_with = 1.0 if q is None else float(q[token])
        if uniforms[place] * drawn_with < float(p[token]):
            continue
        if q is None:
            left = p.clone()
            left[token] = 0
        else:
            left = (p - q.to(p.dtype)).clamp_min(0)
        return place, left if bool(left.any()) else p  # rounding alone may leave nothing
    return len(draft), target(len(draft))
