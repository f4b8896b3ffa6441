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

    A tree has `parents`: the place in the draft of the token before each token, -1 for the last known one. A parent
    comes before its children. Its tokens are certain: a draw from the target is looked up among the children, which
    accepts x with probability p(x), as often as rejection sampling of certain tokens, one after the other, does.

        known token -> a -> b         token_ids = (a, b, c, d)
                       a -> c -> d    parents   = (-1, 0, 0, 2)
    """

    token_ids: tuple[int, ...] = ()
    probabilities: Tensor | None = None
    parents: tuple[int, ...] | None = None  # None is a chain

    def __len__(self) -> int:
        return len(self.token_ids)

    def truncated(self, count: int) -> Draft:
        """Return the draft of the first `count` tokens."""
        if count >= len(self):
            return self
        probabilities = None if self.probabilities is None else self.probabilities[:count]
        return Draft(self.token_ids[:count], probabilities, None if self.parents is None else self.parents[:count])

    def next_row(self, row: int, token: int) -> int | None:
        """Return the row after `token` at `row`, if it is drafted there. Row 0 follows the last known token, and row
        i + 1 the i-th draft token."""
        if self.parents is None:
            return row + 1 if row < len(self.token_ids) and self.token_ids[row] == token else None
        children = (place for place, parent in enumerate(self.parents) if parent == row - 1)
        return next((place + 1 for place in children if self.token_ids[place] == token), None)

    def before(self, row: int) -> tuple[int, ...]:
        """Return the draft tokens before a row, in order."""
        if self.parents is None:
            return self.token_ids[:row]
        drafted, place = [], row - 1
        while place >= 0:
            drafted.append(self.token_ids[place])
            place = self.parents[place]
        return tuple(reversed(drafted))

    def first_branch(self) -> Draft:
        """Return the chain of first children; of a chain, itself."""
        if self.parents is None:
            return self
        branch, last = [], -1
        for place, parent in enumerate(self.parents):
            if parent == last:
                branch.append(self.token_ids[place])
                last = place
        return Draft(tuple(branch))

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the places of the draft tokens along which `token_ids` go, up to the first that is not drafted."""
        places: list[int] = []
        row: int | None = 0
        for token in token_ids:
            if (row := self.next_row(row, token)) is None:
                break
            places.append(row - 1)
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
