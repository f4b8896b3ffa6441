"""Verify draft tokens by speculative sampling (Leviathan et al., 2023; Chen et al., 2023).

A token x drafted from q is accepted with probability min(1, p(x) / q(x)), where p is the target's filtered distribution
given the tokens before it. The first rejected token is replaced by a sample from max(0, p - q), normalized. If all are
accepted, one more token is sampled from the target. So every token has the same distribution as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

ACCEPT_STREAM, DRAFT_STREAM = b"accept", b"draft"  # other purposes of a random number than the draw itself


@dataclass(frozen=True)
class Draft:
    """Tokens that are proposed for a sequence's next positions, and the distributions from which they were sampled.

    `probabilities` is [draft token, vocab], each row given the earlier tokens; None if each token was certain.

    A tree has `parents`: the index in the draft of each token's predecessor, -1 for the last known token. A parent
    precedes its children. A tree's tokens are certain: a draw from the target is looked up among the children, so a
    child x is accepted with probability p(x), the same as with sequential rejection sampling of certain tokens.

        known token -> a -> b         token_ids = (a, b, c, d)
                       a -> c -> d    parents   = (-1, 0, 0, 2)
    """

    token_ids: tuple[int, ...] = ()
    probabilities: Tensor | None = None
    parents: tuple[int, ...] | None = None  # None: a chain

    def __len__(self) -> int:
        return len(self.token_ids)

    def truncated(self, count: int) -> Draft:
        """Return the draft of the first `count` tokens."""
        if count >= len(self):
            return self
        probabilities = None if self.probabilities is None else self.probabilities[:count]
        return Draft(self.token_ids[:count], probabilities, None if self.parents is None else self.parents[:count])

    def next_row(self, row: int, token: int) -> int | None:
        """Return the row after `token`, if the draft has that token at `row`; None if it has another. Row 0 follows the
        last known token, and row i + 1 the i-th draft token.
        """
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
        """Return the draft that consists of the first child at each step; a draft that is a chain returns itself."""
        if self.parents is None:
            return self
        branch, last = [], -1
        for place, parent in enumerate(self.parents):
            if parent == last:
                branch.append(self.token_ids[place])
                last = place
        return Draft(tuple(branch))

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the draft's tokens along the path `token_ids`, up to the first token that is not in the
        draft.
        """
        places: list[int] = []
        row: int | None = 0
        for token in token_ids:
            if (row := self.next_row(row, token)) is None:
                break
            places.append(row - 1)
        return tuple(places)


NO_DRAFT = Draft()


def rejection_sample(draft: Draft, target: Callable[[int], Tensor], uniforms: Sequence[float]) -> tuple[int, Tensor]:
    """Verify a draft by rejection sampling: return the number of accepted tokens, and the weights [vocab] of the token
    after them.

    Args:
        draft: the draft.
        target: function that returns the target's probabilities [vocab], float64, at the i-th draft position, and after
            the last. It is called in order, and no further than needed.
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
        return place, left if bool(left.any()) else p  # rounding may leave no weight
    return len(draft), target(len(draft))
