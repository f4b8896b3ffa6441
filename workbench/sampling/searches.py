"""Search over branches by a part of the user's own: some texts advance together, and it says how they go on.

    branches   | prompt | a b c |      a step computes all of them; the search names the best text so far,
               |        | a b d |      and for each branch which one it continues, with which token
               |        | a b e |

It sees the model's logits after each branch and the states of its tokens after the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from workbench.custom import check_arity, load_custom
from workbench.errors import WorkbenchError
from workbench.request import CustomPart


@dataclass(frozen=True, eq=False)
class Branch:
    """A text of a search: its output with the model's log-probability of each token, the states after the last layer
    [1 + token, hidden] of the prompt's last token and of the output, and the logits [vocab] of the next token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    states: Tensor
    logits: Tensor


class Search(Protocol):
    """`advance` returns the number of the best branch, and (branch, next token) for as many as there are.

    The search ends with the best branch where that has all its tokens, or an end token as its last. At first all
    branches are the prompt alone."""

    def advance(self, branches: Sequence[Branch], /) -> tuple[int, Sequence[tuple[int, int]]]: ...


def load_search(part: CustomPart) -> Search:
    """Build the search that `part` names; WorkbenchError if it cannot be one."""
    made = load_custom(part)
    if not callable(getattr(made, "advance", None)):
        raise WorkbenchError(f"search {part.path}: has no advance; a search needs advance(branches)")
    check_arity(made.advance, 1, f"search {part.path}: advance", "(branches)")
    return cast(Search, made)


def advance_search(search: Search, branches: Sequence[Branch], name: str) -> tuple[int, list[tuple[int, int]]]:
    """Advance `search`. WorkbenchError, naming it, where it fails or names what there is not."""
    try:
        best, going = search.advance(branches)
        found = int(best), [(int(branch), int(token)) for branch, token in going]
    except Exception as error:
        raise WorkbenchError(f"search {name}: raised {type(error).__name__}: {error}") from error
    count, vocab = len(branches), len(branches[0].logits)
    known = all(0 <= branch < count and 0 <= token < vocab for branch, token in found[1])
    if not 0 <= found[0] < count or len(found[1]) != count or not known:
        raise WorkbenchError(
            f"search {name}: must return the best of {count} branches and {count} pairs (branch, token), not {found}"
        )
    return found
