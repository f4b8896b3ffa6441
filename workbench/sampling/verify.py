"""Verify draft tokens by speculative sampling (Leviathan et al., 2023; Chen et al., 2023).

A token x drafted from q is accepted with probability min(1, p(x) / q(x)), where p is the target's filtered distribution
given the tokens before it. The first rejected token is replaced by a sample from max(0, p - q). If all are accepted,
one more token is sampled from the target. So every token has the distribution that it has without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

ACCEPT_STREAM, DRAFT_STREAM = b"accept", b"draft"  # what a random number is for, beside the draw itself


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for a sequence's next positions, and the distributions they were sampled from.

    `probabilities` is [draft token, vocab], each given the tokens before it; None if each was certain.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def truncated(self, count: int) -> Draft:
        """Return the draft of the first `count` tokens."""
        if count >= len(self):
            return self
        return Draft(self.token_ids[:count], None if self.probabilities is None else self.probabilities[:count])

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the places of the draft tokens along which `token_ids` go, up to the first that is not drafted."""
        places: list[int] = []
        for place, (token, drafted) in enumerate(zip(token_ids, self.token_ids, strict=False)):
            if token != drafted:
                break
            places.append(place)
        return tuple(places)


NO_DRAFT = Draft()


def rejection_sample(draft: Draft, target: Callable[[int], Tensor], uniforms: Sequence[float]) -> tuple[int, Tensor]:
    """Verify a draft: return the number of accepted tokens, and the weights [vocab] of the token after them.

    Args:
        draft: the draft.
        target: returns the target's probabilities [vocab], float64, at the i-th draft position, and after the last. It
            is called in order, and no further than needed.
        uniforms: numbers in [0, 1), one per draft token.
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
